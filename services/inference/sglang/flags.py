"""Our settings as the command line of `sglang.launch_server`. Pure: works without SGLang and without a GPU.

What always holds of the command: log-probabilities are those of the sampling temperature, every MoE layer's experts are
returned, weights stay laid out as they were loaded (so that `layout` can say what they hash to), nothing is downloaded.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from services.inference.sglang.settings import SglangSettings
from shared.model.config import ModelConfig

WRITTEN_FOR = "0.5.23"  # of SGLang; flags, endpoints and layouts were read from its source and tried
# SGLang wants a prompt to be shorter than its context by seven (max_req_input_len is context - 6, and not reached), and stops
# two positions earlier than our engine: with so many more positions both serve the same lengths.
HEADROOM = 7
BLOCK = 128  # side of an FP8 block
SPECULATIVE_RUNNING = 48  # SGLang's own number of running requests where drafts are on
SMALLEST_CHUNK = 2048  # of SGLang's own choices of prompt tokens per step

# What would silently change what is answered; never inherited by the child.
FORBIDDEN_VARIABLES = (
    "SGLANG_RETURN_ORIGINAL_LOGPROB",  # log-probabilities at temperature 1, whatever the request sampled with
    "SGLANG_MAX_NEW_TOKENS_LIMIT",
    "SGLANG_ENABLE_EMBED_REPLICATION",
    "PYTHONPATH",  # ours; the child has an environment of its own
)
PROXIES = ("http_proxy", "https_proxy", "all_proxy")


class FlagsRefused(ValueError):
    """Settings that cannot go together, each with its value and what is allowed."""

    def __init__(self, reasons: list[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons


@dataclass(frozen=True, slots=True)
class Launch:
    """`arguments` begin with the interpreter. `variables` come over the environment's."""

    arguments: tuple[str, ...]
    variables: dict[str, str]

    def shell(self) -> str:
        """As a line for a shell."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*words, *map(shlex.quote, self.arguments)])


def launch(
    s: SglangSettings, model: ModelConfig, *, folder: str, port: int | str, serial: int, context: int, queue_limit: int
) -> Launch:
    """`folder` holds the version to start with, whose serial is `serial`; `context`: positions per session. Raises
    FlagsRefused."""
    if reasons := list(refusals(s, model)):
        raise FlagsRefused(reasons)
    arguments = [s.sglang_python or "python", "-m", "sglang.launch_server"]
    for name, value in _flags(s, model, folder, str(port), serial, context, queue_limit):
        arguments += [name] if value is None else [name, value]
    return Launch((*arguments, *shlex.split(s.sglang_more)), _variables(s))


def overlap_lag(s: SglangSettings) -> int:
    """How many tokens that the version before sampled may be counted as a new version's, for each request that ran over
    the update: those of the step in hand. Scheduling overlaps with it, and what it sampled is booked after the pause."""
    ordered = s.sglang_device == "cpu" or "--disable-overlap-schedule" in shlex.split(s.sglang_more)
    return 0 if ordered else s.sglang_draft_steps + 1


def child_environment(inherited: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """The child's whole environment: ours without what would change its answers, without our own settings, some of which are
    secrets, and without proxies: SGLang asks itself whether it serves, and would ask the proxy."""
    kept = {
        n: v
        for n, v in inherited.items()
        if n not in FORBIDDEN_VARIABLES and not n.startswith("ETUDE_") and n.lower() not in PROXIES
    }
    return {**kept, **variables}


def _variables(s: SglangSettings) -> dict[str, str]:
    variables = {"HF_HUB_OFFLINE": "1"}  # the model is a folder
    if s.sglang_device == "cpu":
        # No torch.compile: it would want a C++ compiler and minutes. One thread: more only spin on tiny tensors.
        variables |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    return variables


def _flags(
    s: SglangSettings, model: ModelConfig, folder: str, port: str, serial: int, context: int, queue_limit: int
) -> Iterator[tuple[str, str | None]]:
    cpu = s.sglang_device == "cpu"
    yield "--model-path", folder
    yield "--load-format", "safetensors"
    yield "--weight-version", str(serial)
    yield "--host", "127.0.0.1"
    yield "--port", port
    yield "--device", s.sglang_device
    yield "--dtype", s.sglang_dtype
    yield "--context-length", str(context + HEADROOM)
    yield "--max-queued-requests", str(queue_limit)
    yield "--skip-tokenizer-init", None  # token ids in, token ids out
    yield "--sampling-defaults", "openai"  # not the checkpoint's: its top-p would bias the importance ratios
    yield "--enable-metrics", None
    yield "--log-level-http", "warning"
    if s.sglang_tp > 1:
        yield "--tp-size", str(s.sglang_tp)
    if s.sglang_ep > 1:
        yield "--ep-size", str(s.sglang_ep)
    if s.sglang_dp > 1:
        yield "--dp-size", str(s.sglang_dp)
    if s.sglang_memory:
        yield "--mem-fraction-static", f"{s.sglang_memory:g}"
    if running := s.sglang_running or (16 if cpu else 0):
        yield "--max-running-requests", str(running)
    if tokens := s.sglang_tokens or (8192 if cpu else 0):
        yield "--max-total-tokens", str(tokens)
    if chunk := s.sglang_chunk or (SMALLEST_CHUNK if cpu else 0):
        yield "--chunked-prefill-size", str(chunk)
    if cpu or s.sglang_attention != "auto":
        yield "--attention-backend", "torch_native" if cpu else s.sglang_attention
    if model.moe:
        yield "--enable-return-routed-experts", None  # a dense model has none, and the server would not start
        yield from _of_experts(s, model, cpu)
    if s.sglang_dtype == "bfloat16":
        yield "--enable-fp32-lm-head", None  # logits rounded to bf16 are off by more than a policy moves in a step
    if s.sglang_quantization == "fp8":
        yield "--quantization", "fp8"
        yield "--fp8-gemm-backend", s.sglang_fp8_gemm
    if s.sglang_deterministic:
        yield "--enable-deterministic-inference", None
    if s.sglang_draft_steps:
        yield from _drafts(s, folder, cpu)
    if cpu:
        yield "--sampling-backend", "pytorch"
        yield "--disable-overlap-schedule", None
        yield "--cuda-graph-backend-decode", "disabled"
        yield "--cuda-graph-backend-prefill", "disabled"
        yield "--skip-server-warmup", None
        yield "--sleep-on-idle", None  # else its loop takes a whole core while nobody asks; a request wakes it at once
        yield "--watchdog-timeout", "600"


def _of_experts(s: SglangSettings, model: ModelConfig, cpu: bool) -> Iterator[tuple[str, str | None]]:
    if not cpu:
        yield "--moe-runner-backend", "triton" if s.sglang_moe_runner == "auto" else s.sglang_moe_runner
    if model.moe and model.moe.n_shared_experts:
        yield "--disable-shared-experts-fusion", None  # fused, they lie among the routed experts, on some devices


def _drafts(s: SglangSettings, folder: str, cpu: bool) -> Iterator[tuple[str, str | None]]:
    """NEXTN with our MTP layer. A chain, no tree: its verification keeps the target's distribution exactly."""
    yield "--speculative-algorithm", "NEXTN"
    yield "--speculative-draft-model-path", folder
    yield "--speculative-num-steps", str(s.sglang_draft_steps)
    yield "--speculative-eagle-topk", "1"
    yield "--speculative-num-draft-tokens", str(s.sglang_draft_steps + 1)
    if cpu:
        yield "--speculative-draft-attention-backend", "intel_amx"  # the stand-in's


# -- what cannot go together ---------------------------------------------------------------------------------------------


def refusals(s: SglangSettings, model: ModelConfig) -> Iterator[str]:
    """One sentence for each: setting, value, what is allowed."""
    yield from _parallel(s, model)
    yield from _device(s, model)
    yield from _speculation(s, model)
    yield from _kernels(s, model)
    if s.sglang_quantization == "fp8":
        yield from _fp8(s, model)
    yield from _more(s)


def _parallel(s: SglangSettings, m: ModelConfig) -> Iterator[str]:
    tp, ep = s.sglang_tp, s.sglang_ep
    if m.num_attention_heads % tp:
        yield f"sglang_tp: found {tp}; allowed: a divisor of the model's {m.num_attention_heads} attention heads"
    groups = m.num_key_value_heads
    if not m.mla and groups % tp and tp % groups:
        yield f"sglang_tp: found {tp}; allowed: a divisor or a multiple of the model's {groups} key-value heads"
    if not m.moe:
        if ep > 1:
            yield f"sglang_ep: found {ep}; allowed: 1, the model has no experts"
        if m.intermediate_size % tp:
            yield f"sglang_tp: found {tp}; allowed: a divisor of intermediate_size {m.intermediate_size}"
        return
    if tp % ep:
        yield f"sglang_ep: found {ep}; allowed: a divisor of sglang_tp {tp}"
        return
    if m.moe.num_experts % ep:
        yield f"sglang_ep: found {ep}; allowed: a divisor of the model's {m.moe.num_experts} experts"
    if m.moe.intermediate_size % (tp // ep):
        yield f"sglang_tp: found {tp}; allowed: sglang_tp / sglang_ep divides moe_intermediate_size {m.moe.intermediate_size}"


def _device(s: SglangSettings, m: ModelConfig) -> Iterator[str]:
    if s.sglang_device == "cpu":
        if m.mla and m.rope.factor == 1:
            yield (
                "sglang_device: found 'cpu'; allowed: 'cuda', the checkpoint has DeepSeek's rotary embedding without YaRN, "
                f"which SGLang {WRITTEN_FOR} does not compute on a CPU"
            )
        for name, wanted in {
            "sglang_tp": (1,),
            "sglang_dp": (1,),
            "sglang_quantization": ("none",),
            "sglang_deterministic": (False,),
            "sglang_moe_runner": ("auto",),
            "sglang_attention": ("auto", "torch_native"),
            "sglang_dtype": ("float32",),
        }.items():
            if getattr(s, name) not in wanted:
                allowed = " or ".join(repr(value) for value in wanted)
                yield f"{name}: found {getattr(s, name)!r}; allowed: {allowed} with sglang_device 'cpu'"
    elif s.sglang_attention == "torch_native":
        yield "sglang_attention: found 'torch_native'; allowed: with sglang_device 'cpu' only"
    elif s.sglang_dtype == "float32" and s.sglang_attention != "triton":
        yield (
            f"sglang_dtype: found 'float32'; allowed: with sglang_attention 'triton' (found {s.sglang_attention!r}); the "
            "other kernels know bf16 alone"
        )


def _speculation(s: SglangSettings, m: ModelConfig) -> Iterator[str]:
    steps = s.sglang_draft_steps
    if not steps:
        return
    if m.serving.drafting is None:
        yield f"sglang_draft_steps: found {steps}; allowed: 0, SGLang {WRITTEN_FOR} drafts for no {m.model_type} model"
    elif m.num_mtp_layers != 1:
        yield (
            f"sglang_draft_steps: found {steps}; allowed: 0, the checkpoint has {m.num_mtp_layers} MTP layers and SGLang "
            "drafts with exactly 1"
        )
    running, chunk = s.sglang_running or SPECULATIVE_RUNNING, s.sglang_chunk or SMALLEST_CHUNK
    if m.moe and running * (steps + 1) > chunk:  # the rows of its routing buffer do not count drafts
        yield (
            f"sglang_running: found {running}; allowed: at most {chunk // (steps + 1)}, sglang_chunk {chunk} / "
            f"({steps} drafts + 1), else returned experts overflow SGLang's buffer"
        )


def _kernels(s: SglangSettings, m: ModelConfig) -> Iterator[str]:
    if s.sglang_moe_runner != "auto" and not m.moe:
        yield f"sglang_moe_runner: found {s.sglang_moe_runner!r}; allowed: 'auto', the model has no experts"
    if s.sglang_moe_runner == "deep_gemm" and s.sglang_quantization != "fp8":
        yield "sglang_moe_runner: found 'deep_gemm'; allowed: with sglang_quantization 'fp8' only"
    if s.sglang_fp8_gemm != "auto" and s.sglang_quantization != "fp8":
        yield f"sglang_fp8_gemm: found {s.sglang_fp8_gemm!r}; allowed: with sglang_quantization 'fp8' only"
    invariant = ("auto", "fa3", "fa4", "triton")  # flashinfer would be, too, but loses the shared prefixes
    if s.sglang_deterministic and s.sglang_attention not in invariant:
        allowed = ", ".join(map(repr, invariant))
        yield f"sglang_attention: found {s.sglang_attention!r}; allowed: {allowed} with sglang_deterministic"


def _fp8(s: SglangSettings, m: ModelConfig) -> Iterator[str]:
    """A block belongs to one device, and no matrix ends within one."""
    if s.sglang_dtype != "bfloat16":
        yield f"sglang_dtype: found {s.sglang_dtype!r}; allowed: 'bfloat16' with sglang_quantization 'fp8'"
    tp = s.sglang_tp
    sizes = {"hidden_size": m.hidden_size}
    if m.mla:
        sizes |= {
            "kv_lora_rank": m.mla.kv_lora_rank,
            "heads x (qk_nope_head_dim + v_head_dim) / sglang_tp": m.num_attention_heads
            * (m.mla.qk_nope_head_dim + m.mla.v_head_dim)
            // tp,
            "heads x v_head_dim / sglang_tp": m.num_attention_heads * m.mla.v_head_dim // tp,
        }
        if m.mla.q_lora_rank:
            sizes["q_lora_rank"] = m.mla.q_lora_rank
    else:
        sizes |= {
            "heads x head_dim / sglang_tp": m.num_attention_heads * m.head_dim // tp,
            "key-value heads x head_dim / sglang_tp": max(1, m.num_key_value_heads // tp) * m.head_dim,
        }
    if m.moe and tp % s.sglang_ep == 0:
        sizes["moe_intermediate_size / (sglang_tp / sglang_ep)"] = m.moe.intermediate_size // (tp // s.sglang_ep)
    if len(m.moe_layers) < m.num_hidden_layers:
        sizes["intermediate_size / sglang_tp"] = m.intermediate_size // tp
    for name, size in sizes.items():
        if size % BLOCK:
            yield f"sglang_quantization: found 'fp8'; allowed: where {name} is a multiple of {BLOCK} (found {size})"


def _more(s: SglangSettings) -> Iterator[str]:
    try:
        words = shlex.split(s.sglang_more)
    except ValueError as error:
        yield f"sglang_more: found {s.sglang_more!r}: {error}; allowed: arguments as on a shell"
        return
    for word in words:
        name = word.split("=")[0]
        if name in TAKEN:
            yield f"sglang_more: found {name!r}; allowed: arguments that no setting is for; use {TAKEN[name]}"


# Arguments that are composed here, also under their other names, and what to use instead.
TAKEN = {
    "--model-path": "the run's checkpoint",
    "--model": "the run's checkpoint",
    "--load-format": "nothing: versions are safetensors",
    "--weight-version": "nothing: it is the serial",
    "--host": "nothing: the child is reached through this service",
    "--port": "sglang_port",
    "--device": "sglang_device",
    "--dtype": "sglang_dtype",
    "--context-length": "context",
    "--max-queued-requests": "queue_limit",
    "--sampling-defaults": "nothing: training samples with the temperature alone",
    "--tp": "sglang_tp",
    "--tp-size": "sglang_tp",
    "--tensor-parallel-size": "sglang_tp",
    "--ep": "sglang_ep",
    "--ep-size": "sglang_ep",
    "--expert-parallel-size": "sglang_ep",
    "--dp": "sglang_dp",
    "--dp-size": "sglang_dp",
    "--data-parallel-size": "sglang_dp",
    "--mem-fraction-static": "sglang_memory",
    "--max-running-requests": "sglang_running",
    "--max-total-tokens": "sglang_tokens",
    "--chunked-prefill-size": "sglang_chunk",
    "--attention-backend": "sglang_attention",
    "--moe-runner-backend": "sglang_moe_runner",
    "--quantization": "sglang_quantization",
    "--fp8-gemm-backend": "sglang_fp8_gemm",
    "--enable-deterministic-inference": "sglang_deterministic",
    "--speculative-algorithm": "sglang_draft_steps",
    "--speculative-num-steps": "sglang_draft_steps",
    "--speculative-draft-model-path": "sglang_draft_steps",
    "--speculative-eagle-topk": "sglang_draft_steps",
    "--speculative-num-draft-tokens": "sglang_draft_steps",
    # These would lay weights out otherwise, or spread them in ways that `layout` does not know.
    "--pp-size": "sglang_tp",
    "--pipeline-parallel-size": "sglang_tp",
    "--attn-dp-size": "sglang_dp",
    "--attention-data-parallel-size": "sglang_dp",
    "--enable-dp-attention": "sglang_dp",
    "--enable-eplb": "nothing: experts stay where they are",
    "--ep-num-redundant-experts": "nothing: experts stay where they are",
    "--enforce-shared-experts-fusion": "nothing: shared experts stay apart",
    "--moe-a2a-backend": "sglang_ep",
}
