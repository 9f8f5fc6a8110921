"""A site's own rules of failures: what they add, and how a mistake in them is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ConfigError
from common.failure_rules import NO_SIGNATURE, FailureRules, RuleFile, read_rules
from common.failures import RetryClass

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


@pytest.mark.parametrize(
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


def test_a_file_that_is_not_there_is_a_mistake() -> None:
    """It is said and not passed over: the site believes its rules to hold."""
    with pytest.raises(ConfigError, match="No such file"):
        read_rules("/nonexistent/site.toml")


def test_rules_without_the_last_resort_are_none() -> None:
    """Every failure has a reason, so the one for no signature must be there."""
    with pytest.raises(ConfigError, match=NO_SIGNATURE):
        FailureRules(RuleFile())
