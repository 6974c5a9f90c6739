"""Run the real megatron-core 0.19.2 and megatron-bridge 0.6.2 where there is neither a GPU nor TransformerEngine.

    from helpers.cpu import megatron_backend
    megatron_backend.install()          # before the first import of megatron

What is replaced, why, and the hash of the upstream source it was written against: helpers/cpu/manifest.py.
The device renaming holds in the thread that called `install` only (a torch function mode is thread-local): use Megatron on
a CPU in plain scripts, in a notebook's main thread, or in synchronous single-threaded Ray actors.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import logging
import os
import sys
import types

from helpers.profiles import DEVICE_VARIABLE

log = logging.getLogger(__name__)
_LORA_LAYERS = "megatron.bridge.peft.lora_layers"


class WrongBackend(RuntimeError):
    """The CPU back end was asked for in a process that was not told to run on the CPU, or that sees a GPU."""


def install() -> None:
    """Make this process a CPU process. Idempotent. Raises WrongBackend when the setting or the hardware says otherwise."""
    import torch

    if os.environ.get(DEVICE_VARIABLE) != "cpu":
        raise WrongBackend(
            f"{DEVICE_VARIABLE} is {os.environ.get(DEVICE_VARIABLE)!r}, so this process must not take the CPU back end; "
            "start it with the environment of a CPU profile (Profile.process_environment)"
        )
    if torch.cuda.is_available():
        raise WrongBackend(
            "the profile says cpu, but this process sees a GPU; set CUDA_VISIBLE_DEVICES='' or take profile gpu"
        )
    if _installed():
        return
    sys.meta_path.insert(0, _LoraLayersFinder())
    _rename_cuda_devices(torch)
    from helpers.bridge import quiet_libraries

    with quiet_libraries():
        import megatron.bridge  # noqa: F401
    _map_local_input_layernorm()
    _numpy_alltoall_splits()
    _allow_sequence_parallel_norm()


def require_mode() -> None:
    """Raise WrongBackend when called from a thread in which the device renaming does not hold."""
    import torch

    if not _installed() or torch.zeros(0, device="cuda").device.type != "cpu":
        raise WrongBackend(
            "Megatron's CPU back end holds only in the thread that installed it; use a synchronous Ray actor "
            "(no max_concurrency, no concurrency groups) or the notebook's main thread"
        )


def _installed() -> bool:
    from torch.overrides import _get_current_function_mode_stack

    return any(type(mode).__name__ == "CudaMeansCpu" for mode in _get_current_function_mode_stack())


# --- 1. one module of the bridge imports TransformerEngine without a guard --------------------------------------------
class _LoraLayersFinder(importlib.abc.MetaPathFinder):
    """Shows a stand-in to that one module and takes it away again: every guarded import still learns that TE is absent."""

    def find_spec(self, name, path=None, target=None):
        if name != _LORA_LAYERS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        spec.loader = _WithStandIn(spec.loader)
        return spec


class _WithStandIn(importlib.abc.Loader):
    def __init__(self, inner):
        self.inner = inner

    def create_module(self, spec):
        return self.inner.create_module(spec)

    def exec_module(self, module):
        stand_in = _transformer_engine_stand_in()
        sys.modules.update(stand_in)
        try:
            self.inner.exec_module(module)
        finally:
            for name in stand_in:
                del sys.modules[name]


def _transformer_engine_stand_in() -> dict[str, types.ModuleType]:
    """Just the names that lora_layers.py uses in isinstance() and annotations."""
    engine, pytorch = types.ModuleType("transformer_engine"), types.ModuleType("transformer_engine.pytorch")
    engine.pytorch, engine.__path__ = pytorch, []
    for name in ("Linear", "LayerNormLinear"):
        setattr(pytorch, name, type(name, (), {}))
    pytorch.ops = types.SimpleNamespace(Sequential=type("Sequential", (), {}))
    return {"transformer_engine": engine, "transformer_engine.pytorch": pytorch}


# --- 2. "cuda" means "cpu" --------------------------------------------------------------------------------------------
class _NoStream:
    """Stands for torch.cuda.Stream and Event: on a CPU everything is in order already."""

    def __init__(self, *args, **kwargs):
        pass

    def __eq__(self, other):
        return isinstance(other, _NoStream)

    __hash__ = object.__hash__

    def _nothing(self, *args, **kwargs):
        return self

    wait_stream = wait_event = synchronize = record_event = record = wait = _nothing


def _rename_cuda_devices(torch) -> None:
    """Megatron allocates with device="cuda" and torch.cuda.current_device() in many modules; here both mean the CPU."""
    cuda = torch.cuda
    cuda.current_device = lambda: "cpu"
    for name in ("set_device", "synchronize", "empty_cache"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    cuda.Stream = cuda.Event = _NoStream
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: _NoStream()
    cuda.stream = lambda *args, **kwargs: contextlib.nullcontext()
    _mode_class(torch)().__enter__()  # for the life of the process


def _mode_class(torch):
    from torch.overrides import TorchFunctionMode

    def is_cuda(device) -> bool:
        if isinstance(device, torch.device):
            return device.type == "cuda"
        return isinstance(device, str) and device.startswith("cuda")

    class CudaMeansCpu(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if func is torch.Tensor.cuda:
                return args[0]
            if func is torch.Tensor.type and len(args) == 1 and not kwargs:
                # Megatron's optimizers sort parameters by the name 'torch.cuda.FloatTensor'
                return func(*args).replace("torch.", "torch.cuda.", 1)
            if kwargs and is_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": "cpu"}
            elif func is torch.Tensor.to and len(args) > 1 and is_cuda(args[1]):
                args = (args[0], "cpu", *args[2:])
            return func(*args, **kwargs)

    return CudaMeansCpu


# --- 3. gaps between the bridge, the local (not TE) layers and the CPU ------------------------------------------------
def _map_local_input_layernorm() -> None:
    """TE fuses the input layernorm into linear_qkv; the local layer keeps it apart. GPTOSSBridge maps TE's name only."""
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
    from megatron.bridge.models.conversion.param_mapping import AutoMapping
    from megatron.bridge.models.gpt_oss.gpt_oss_bridge import GPTOSSBridge

    upstream = GPTOSSBridge.mapping_registry

    def mapping_registry(self):
        local = AutoMapping(
            hf_param="model.layers.*.input_layernorm.weight",
            megatron_param="decoder.layers.*.input_layernorm.weight",
        )
        return MegatronMappingRegistry(*upstream(self).mappings, local)

    GPTOSSBridge.mapping_registry = mapping_registry


def _numpy_alltoall_splits() -> None:
    """The all-to-all dispatcher turns its split sizes into numbers only when they are CUDA tensors."""
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    upstream = dispatcher.maybe_move_tensor_to_cpu

    def maybe_move_tensor_to_cpu(tensor, as_numpy=False, record_stream=False):
        tensor = upstream(tensor, as_numpy=False, record_stream=False)
        return tensor.numpy() if as_numpy and hasattr(tensor, "numpy") else tensor

    dispatcher.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu


def _allow_sequence_parallel_norm() -> None:
    """MoE training with tensor parallelism demands sequence parallelism, which the torch norm refuses.

    Marking its weight is all that is missing: finalize_model_grads then sums that gradient over the tensor group.
    """
    import torch
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def new(cls, config, hidden_size, eps=1e-5, **kwargs):
        norm = torch.nn.RMSNorm(hidden_size, eps=eps)
        norm.weight.sequence_parallel = config.sequence_parallel
        return norm

    WrappedTorchNorm.__new__ = staticmethod(new)


def clone_expert_outputs(models: list) -> list:
    """A pre-wrap hook: give every local expert's fc2 output storage of its own.

    MLP.forward adds the expert bias in place, which autograd forbids on what RowParallelLinear returns when its tensor
    group has one member. Not a matter of the CPU: SequentialMLP with expert biases fails on a GPU in the same way.
    """
    for model in models:
        for name, module in model.named_modules():
            if ".local_experts." in name and name.endswith(".linear_fc2"):
                module.register_forward_hook(lambda module, inputs, output: (output[0].clone(), output[1]))
    return models


def configure_provider(provider, dtype: str = "float32"):
    """The public settings of a GPTModelProvider that a CPU needs, with weights of this dtype. Returns the provider."""
    import torch
    from megatron.bridge.models.gpt_provider import local_layer_spec

    provider.transformer_layer_spec = local_layer_spec  # no TransformerEngine
    fused_on_gpu_only = (
        "moe_grouped_gemm", "moe_permute_fusion", "masked_softmax_fusion", "bias_activation_fusion",
        "gradient_accumulation_fusion", "persist_layer_norm", "apply_rope_fusion",
    )  # fmt: skip
    for name in fused_on_gpu_only:
        setattr(provider, name, False)
    provider.use_cpu_initialization = True
    provider.bf16 = dtype == "bfloat16"
    provider.params_dtype = provider.pipeline_dtype = provider.autocast_dtype = getattr(torch, dtype)
    provider.register_pre_wrap_hook(clone_expert_outputs)
    return provider
