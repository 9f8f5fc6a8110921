"""The series of each inference engine's metrics page: vLLM, SGLang, Triton and others.

`engine_page_parser` parses a page by them. They are presets of `agent.settings.MetricsSettings`: a
site can write the same settings itself. Names and meanings come from the engines' own sources:
vLLM 0.4 to 0.32, SGLang 0.3 to 0.5.10, Triton 23.04 and later, TensorRT-LLM 1.1 and later, Dynamo
0.7 and later, NIM for LLMs 1.x and 2.x, llama.cpp of 2024 to 2026, TGI 1.4 to 3. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from agent.settings import Combine, CountSettings, MetricsSettings
from common.errors import ConfigError


class Dialect(Struct, frozen=True, kw_only=True):
    """One set of names that an engine's pages use; `when`: only where the page has this."""

    name: str
    metrics: MetricsSettings
    when: CountSettings | None = None


def _one(*series: str, **labels: str) -> CountSettings:
    return CountSettings(series=series, labels=labels)


def _lazy(*series: str, **labels: str) -> CountSettings:
    """A series that the engine creates at its first event, or that only some servers have."""
    return CountSettings(series=series, labels=labels, optional=True)


def _vllm(prefix: str, name: str, *, is_lazy: bool = False) -> Dialect:
    """vLLM with its names behind a prefix.

    V0 has requests swapped to the CPU beside those that run or wait. Ray Serve creates a counter at
    its first event, without declaring it before.
    """
    success = (f"{prefix}request_success_total", f"{prefix}request_success")
    return Dialect(
        name=name,
        metrics=MetricsSettings(
            running=(_one(f"{prefix}num_requests_running"),),
            waiting=(
                _one(f"{prefix}num_requests_waiting"),
                _lazy(f"{prefix}num_requests_swapped"),
            ),
            succeeded=(_lazy(*success) if is_lazy else _one(*success),),
            kv_cache=(_lazy(f"{prefix}kv_cache_usage_perc", f"{prefix}gpu_cache_usage_perc"),),
        ),
    )


_VLLM = (
    _vllm("vllm:", "vLLM"),
    _vllm("vllm_", "vLLM behind an exporter"),
    # Ray puts `ray_` before each name, and from 2.49 on a `_` for the colon.
    _vllm("ray_vllm_", "vLLM in Ray Serve", is_lazy=True),
    _vllm("ray_vllm:", "vLLM in Ray Serve", is_lazy=True),
)

_SGLANG_RANKS = ("tp_rank", "pp_rank", "moe_ep_rank", "attn_tp_rank", "attn_cp_rank", "cp_rank")
"""Ranks that work on the same requests, unlike those of different `dp_rank`."""
_SGLANG_QUEUES = (
    # In front of the queue of those that wait for their grammar, and around it where prefill and
    # decode are servers of their own: https://docs.sglang.ai, PD disaggregation.
    ("num_grammar_queue_reqs",),
    ("num_prefill_bootstrap_queue_reqs", "num_prefill_prealloc_queue_reqs"),
    ("num_prefill_inflight_queue_reqs",),
    ("num_decode_prealloc_queue_reqs",),
    ("num_decode_transfer_queue_reqs",),
)


def _sglang(prefix: str, name: str) -> Dialect:
    def count(*names: str, optional: bool = False) -> CountSettings:
        return CountSettings(
            series=tuple(f"{prefix}{one}" for one in names),
            labels={"priority": ""},  # series with the label are parts of the total without it
            copies=_SGLANG_RANKS,
            optional=optional,
        )

    return Dialect(
        name=name,
        metrics=MetricsSettings(
            running=(count("num_running_reqs"),),
            waiting=(
                count("num_queue_reqs"),
                *(count(*names, optional=True) for names in _SGLANG_QUEUES),
            ),
            succeeded=(_lazy(f"{prefix}num_requests_total", f"{prefix}num_requests"),),
            kv_cache=(_lazy(f"{prefix}token_usage"),),
        ),
    )


# Triton does not report how many requests run; its LLM back ends do. Without one, only a constant
# success counter shows that nothing runs. Requests waiting in a back end have left Triton's own
# queue.
_TRITON_SUCCESS = "nv_inference_request_success"
_TRITON = MetricsSettings(
    running=(
        _lazy("nv_trt_llm_request_metrics", request_type="scheduled"),
        _lazy("vllm:num_requests_running"),
    ),
    waiting=(
        _one("nv_inference_pending_request_count"),
        _lazy("nv_trt_llm_request_metrics", request_type="waiting"),
        _lazy("vllm:num_requests_waiting"),
    ),
    succeeded=(_one(_TRITON_SUCCESS),),
    kv_cache=(
        _lazy("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="fraction"),
        _lazy("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    ),
)
# Each request of an ensemble counts at the ensemble and at each of its steps. The page does not
# distinguish steps from other models, so the model with the most stands for all.
_TRITON_ENSEMBLE = MetricsSettings(
    running=_TRITON.running,
    waiting=_TRITON.waiting,
    succeeded=(CountSettings(series=(_TRITON_SUCCESS,), by=("model",), combine=Combine.MAX),),
    kv_cache=_TRITON.kv_cache,
)


def _trtllm(prefix: str, name: str) -> Dialect:
    """Needs `enable_iter_perf_stats`; its gauges come with the first iteration."""
    return Dialect(
        name=name,
        metrics=MetricsSettings(
            running=(_one(f"{prefix}num_requests_running"),),
            waiting=(_one(f"{prefix}num_requests_waiting"),),
            succeeded=(
                _one(f"{prefix}request_success_total", f"{prefix}num_requests_completed_total"),
            ),
            kv_cache=(_lazy(f"{prefix}kv_cache_utilization"),),
        ),
    )


_DYNAMO = (
    Dialect(
        name="Dynamo worker",
        metrics=MetricsSettings(
            # From a request's arrival to its last token, including its wait in the engine.
            running=(_one("dynamo_component_inflight_requests", dynamo_endpoint="generate"),),
            # `requests_total` of a worker counts arrivals, the histogram completions.
            succeeded=(
                _one("dynamo_component_request_duration_seconds_count", dynamo_endpoint="generate"),
            ),
        ),
    ),
    Dialect(
        name="Dynamo frontend",
        metrics=MetricsSettings(
            running=(_one("dynamo_frontend_inflight_requests"),),  # the queued ones are among them
            succeeded=(_lazy("dynamo_frontend_requests_total"),),
        ),
    ),
)

_NIM = Dialect(
    name="NIM",
    metrics=MetricsSettings(
        running=(_one("num_requests_running"),),
        waiting=(_one("num_requests_waiting"),),
        succeeded=(_one("request_success_total", "request_finish_total"),),
        kv_cache=(_lazy("gpu_cache_usage_perc", "kv_cache_usage_perc"),),
    ),
)

_LLAMACPP = MetricsSettings(
    running=(_one("llamacpp:requests_processing"),),
    waiting=(_one("llamacpp:requests_deferred"),),
    # It counts no requests: its load is in tokens.
    succeeded=(_one("llamacpp:prompt_tokens_total"), _lazy("llamacpp:tokens_predicted_total")),
    kv_cache=(_lazy("llamacpp:kv_cache_usage_ratio"),),
)

# TGI makes its counters at the first request, its gauges when the batcher starts.
_TGI = MetricsSettings(
    running=(_one("tgi_batch_current_size"),),
    waiting=(_one("tgi_queue_size"),),
    succeeded=(_lazy("tgi_request_success", "tgi_request_success_total"),),
)

ENGINES: Mapping[str, tuple[Dialect, ...]] = {
    "vllm": _VLLM,
    "sglang": (
        _sglang("sglang:", "SGLang"),
        _sglang("sglang_", "SGLang behind an exporter"),
        _sglang("ray_sglang_", "SGLang in Ray Serve"),
    ),
    "triton": (
        Dialect(
            name="Triton with an ensemble",
            metrics=_TRITON_ENSEMBLE,
            when=_one(_TRITON_SUCCESS, model="*ensemble*"),
        ),
        Dialect(name="Triton", metrics=_TRITON),
    ),
    "trtllm": (
        _trtllm("trtllm_", "TensorRT-LLM"),
        _trtllm("trtllm:", "TensorRT-LLM in Dynamo 0.7"),
    ),
    "dynamo": _DYNAMO,
    "nim": (_NIM, _VLLM[0]),
    "llamacpp": (Dialect(name="llama.cpp", metrics=_LLAMACPP),),
    "tgi": (Dialect(name="TGI", metrics=_TGI),),
}
"""The dialects of each engine; the first that fits a page reads it."""


def engine_named(name: str) -> tuple[Dialect, ...]:
    """The dialects of this engine.

    Raises:
        ConfigError: the engine is unknown.
    """
    try:
        return ENGINES[name]
    except KeyError:
        known = ", ".join(sorted(ENGINES))
        raise ConfigError(f"engine: {name!r} is not known, expected one of {known}") from None
