"""A site's own rules of failures: what they add, and how a mistake in them is said."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.failure_rules import NO_SIGNATURE, FailureRules, RuleFile, read_rules
from common.failures import RetryClass
from tests.tables import each_row

PAGE = Path(__file__).parents[2] / "docs" / "operate.md"
TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n'


def test_a_site_goes_before_the_packaged_rules(tmp_path: Path) -> None:
    """A site's own file adds reasons and signatures, and changes what a reason means."""
    path = tmp_path / "site.toml"
    path.write_text(
        """
        [[reason]]
        name = "licence_server"
        title = "Licence server"
        retry = "back_off"

        [[reason]]
        name = "gpu_out_of_memory"
        title = "GPU out of memory"
        origins = ["user"]
        retry = "elsewhere"

        [[signature]]
        reason = "licence_server"
        patterns = ['KeyError: .*seat']
        """
    )
    rules = read_rules(str(path))
    found = rules.classify(b"KeyError: no seat left\n", exit_code=1)
    assert (found.reason, found.retry) == ("licence_server", RetryClass.BACK_OFF)
    assert found.origins == ()  # nobody said who has to look at it
    assert rules.classify(b"KeyError: 'x'\n", exit_code=1).reason == "semantic_error"
    assert rules.failure("gpu_out_of_memory").retry == RetryClass.ELSEWHERE


def test_the_operators_example_is_a_file_of_rules(tmp_path: Path) -> None:
    """What an operator copies loads, and each of its signatures says what its comment promises."""
    section = PAGE.read_text().partition("\n## Add failure rules\n")[2].partition("\n## ")[0]
    [block] = re.findall(r"^ *```toml\n(.*?)^ *```$", section, re.MULTILINE | re.DOTALL)
    path = tmp_path / "site.toml"
    path.write_text(textwrap.dedent(block))
    rules = read_rules(str(path))
    for log, code in (
        (b"no licence seat left\n", 1),
        (b"lmutil: Cannot check out (-4,132)\n", 1),
        (b"\n", 75),
    ):
        found = rules.classify(log, exit_code=code)
        assert (found.reason, found.retry, found.is_free) == (
            "licence_server",
            RetryClass.BACK_OFF,
            True,
        )
    assert rules.classify(b"shard 7: checksum differs\n", exit_code=1).reason == "incorrect_inputs"
    lost = b"fabric manager: partition went away\n"
    assert rules.classify(lost, exit_code=1).reason == "mpi_error"
    assert rules.classify(lost + b"KeyError: 'x'\n", exit_code=1).reason == "semantic_error"


SITE_WORDS = """
    [[signature]]
    reason = "job_preempted"
    texts = ["fabric manager"]
    is_implicit = {is_implicit}
"""


@pytest.mark.parametrize(
    ("is_implicit", "expected"), [("true", "gpu_out_of_memory"), ("false", "job_preempted")]
)
def test_an_outcome_of_a_site_yields_to_a_packaged_root_cause(
    tmp_path: Path, is_implicit: str, expected: str
) -> None:
    """Explicit goes before implicit across files; a site's explicit words count in warnings too."""
    path = tmp_path / "site.toml"
    path.write_text(SITE_WORDS.format(is_implicit=is_implicit))
    log = "WARNING: fabric manager\n" + TRACEBACK + "torch.OutOfMemoryError: CUDA out of memory\n"
    assert read_rules(str(path)).classify(log.encode(), exit_code=1).reason == expected
    silent = read_rules(str(path)).classify(b"WARNING: fabric manager\nbye\n", exit_code=1)
    assert (silent.reason, silent.is_explicit) == ("job_preempted", is_implicit == "false")


@each_row(
    ("text", "expected"),
    [
        ("[[signature]]\nreason = 'nonsense'", "reason 'nonsense' is not one of"),
        ("[[signature]]\nreason = 'core_dump'\npatterns = ['(']", "core_dump: patterns: missing )"),
        ("[[signature]]\nreason = 'core_dump'\ntexts = ['']", "an empty text is in every log"),
        ("[[signatur]]\nreason = 'core_dump'", "unknown field `signatur`"),
        ("[[reason]", "failure rules:"),
        ("[[signature]]\nreason = 'core_dump'", "no failure can show it: expected texts, patterns"),
        (
            "[[signature]]\nreason = 'core_dump'\ntexts = ['x']\n"
            "[[signature]]\nreason = 'core_dump'\nis_certain = true",
            "signature[1]: core_dump: no failure can show it",
        ),
        *(
            (
                f"[[signature]]\nreason = 'core_dump'\npatterns = ['boom', {pattern}]",
                f"signature[0]: core_dump: patterns: {pattern} matches every line",
            )
            for pattern in (
                "'.*'",
                "'x*'",
                "'^'",
                "'^$'",
                "'boom|'",
                "'(?!boom)'",
                "'.'",
                "'.{5,}'",
                "'[a-z]'",
                "'.{8}'",
                "'[0-9]+'",
            )
        ),
        ("[[signature]]\nreason = 'core_dump'\npatterns = ['  ']", "core_dump: patterns: an empty"),
        ("[[signature]]\nreason = 'core_dump'\ntexts = ['x', ' ']", "core_dump: texts: an empty"),
        *(
            (
                f"[[signature]]\nreason = 'core_dump'\nexit_codes = [3, {code}]",
                f"signature[0]: core_dump: exit_codes: no failure ends with {code}: expected 1 to",
            )
            for code in (0, 256, -65)
        ),
        (
            "[[reason]]\nname = 'seats'\ntitle = 'Seats'\nretry = 'never'\n" * 2,
            "reason[1]: name: 'seats' is defined twice",
        ),
    ],
)
def test_a_site_s_mistake_is_said(tmp_path: Path, text: str, expected: str) -> None:
    """A file that is none of rules, or names what is not there, is named with what is wrong."""
    path = tmp_path / "site.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_rules(str(path))
    assert str(raised.value).startswith(f"failure rules: {path}: ")
    assert expected in str(raised.value)


@pytest.mark.parametrize("shown", ["texts = ['x']", "patterns = ['x']", "exit_codes = [7]"])
def test_one_way_to_show_it_is_enough(tmp_path: Path, shown: str) -> None:
    """Texts, patterns or exit codes make a signature, each alone."""
    path = tmp_path / "site.toml"
    path.write_text(f"[[signature]]\nreason = 'core_dump'\n{shown}\n")
    rules = read_rules(str(path))
    assert rules.classify(b"x\n", exit_code=7).reason == "core_dump"


@each_row("pattern", ["(a+)+b", "(0*)*b", "(-|--)+b", "(.*)*b"])
def test_a_pattern_that_may_take_for_ever_is_read_at_once(tmp_path: Path, pattern: str) -> None:
    """It is tried on short lines only: whoever matches logs with it can end that, a start cannot.

    A reader of forty such characters would not come to an end.
    """
    path = tmp_path / "site.toml"
    path.write_text(f"[[signature]]\nreason = 'core_dump'\npatterns = ['{pattern}']\n")
    assert read_rules(str(path)).has_site_patterns


def test_a_file_that_is_not_there_is_a_mistake() -> None:
    """It is said and not passed over: the site believes its rules to hold."""
    with pytest.raises(ConfigError, match="No such file"):
        read_rules("/nonexistent/site.toml")


def test_rules_without_the_last_resort_are_none() -> None:
    """Every failure has a reason, so the one for no signature must be there."""
    with pytest.raises(ConfigError, match=NO_SIGNATURE):
        FailureRules(RuleFile())


@each_row("pattern", [r"\w", r"\d", r"\s", r"\w+\s", r".{8}", r"(?i)[a-z]"])
def test_a_pattern_of_ordinary_lines_is_refused(tmp_path: Path, pattern: str) -> None:
    """What letters, digits or a few characters of any kind match tells no failure from steps."""
    path = tmp_path / "site.toml"
    path.write_text(f"[[signature]]\nreason = 'core_dump'\npatterns = ['{pattern}']\n")
    with pytest.raises(ConfigError, match=r"core_dump: patterns: .* matches every line"):
        read_rules(str(path))
