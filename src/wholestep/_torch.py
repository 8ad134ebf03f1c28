"""Every private torch name wholestep uses, and why. Checked with torch 2.11 to 2.15.

Each entry: the name (the version it is there since), what it is for; what would replace it.

- fx.experimental.proxy_tensor.make_fx (1.12): traces a whole step into one ATen graph; a public joint tracer.
- _subclasses.fake_tensor.FakeTensorMode, ShapeEnv (2.0): tensors without storage while tracing; a public fake mode.
- nn.Module._parameters, _buffers, _modules (0.1): what a module holds, to be replaced; public writable views.
- compiler._is_compiling_flag (2.1): selects the tensor-only form of torch.optim; a public switch for it.
- autograd.graph._engine_run_backward (2.2): marks nodes made in a backward; node.meta["autograd_backward"] on every op.
- _decomp.get_decompositions (1.13): batch norm's hidden write into its statistics; schemas that name every mutation.
- _C._get_mkldnn_enabled, _set_mkldnn_enabled (1.2): torch.backends.mkldnn.enabled, which torch's test library locks,
  and whose context manager warns about TF32; a public switch without either.
- library.Library("aten"), _dispatch_has_kernel (1.13): shape functions that fused optimizers lack; the same in torch.
- fx._lazy_graph_module (2.2): graph modules that write no code before they are called; a switch of GraphModule.
- utils._pytree (1.8): flattens a step's arguments and results, writes their structure to a file; torch.utils.pytree.
- _C.DisableTorchFunction (1.13): values are read while a step is traced; a public switch for torch function modes.
- _inductor.compile (2.0): compiles the arithmetic of a local graph; a public graph compiler.
- distributed.distributed_c10d._get_default_store (1.13): ranks compare programs in it; a public store accessor.
- utils._python_dispatch.TorchDispatchMode (1.13): sees the ATen calls that sample functions make; a public mode.
- _C._dispatch_get_all_op_names, _dispatch_has_computed_kernel_for_dispatch_key (1.13): which ops there are, and which
  of them run on CPU, to check the rules of whole families; a public list.
- testing._internal.common_methods_invocations.op_db (1.7): sample arguments to check rules on; a public database.
- _C._storage_Use_Count (2.0): whether memory is held by others yet; a public count.
- _C._distributed_c10d._resolve_process_group, _register_work (2.3): an exchange into memory that is given, waited for
  as a functional collective; an out variant of all_to_all_single.
- distributed.tensor.debug._comm_mode.NATIVE_TO_PY_MAPPING (2.5): CommDebugMode counts a gather's out variant and
  an all-reduce in place; entries.
- distributed.tensor._dtensor_spec.DTensorSpec (2.5): a DTensor of GPUs whose piece rests in host memory; from_local
  that leaves the piece where it is.
- distributed.tensor.placement_types._StridedShard (2.5): FSDP on top of TP on one dim; ordered placements.
- _dynamo.lookup_backend (2.0), _inductor.list_mode_options (2.0): inner backends by name, with options; torch.compile
  of a part.
- _dynamo.config.optimize_ddp (2.0): torch's own splitter off where ours is chosen; a say of the backend's in that.
- DistributedDataParallel._get_active_ddp_module (1.13), _has_rebuilt_buckets (1.13), and in torch.distributed
  _DEFAULT_FIRST_BUCKET_BYTES (1.8): which model runs, whether its buckets are settled, its first cap; properties.
- _guards.TracingContext, tracing (2.0): each part of a split graph is compiled in a context of its own, and gives fake
  results with the strides it really makes; a public way to compile one graph as several.
- _C._autograd._saved_tensors_hooks_set_tracing (2.3): hooks on saved tensors wait while a part runs on fakes.
- _C._set_grad_enabled (1.0): where gradients are switched off and on in dynamo's graphs; the public class, traced.
- nodes' _dynamo_source (2.5), modules' _param_name_to_source (2.1): what a part takes came from there; node.meta.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeGuard, cast

import torch
import torch.autograd
import torch.fx.traceback as fx_traceback
import torch.utils._pytree as pytree
from torch._decomp import get_decompositions  # pyright: ignore[reportUnknownVariableType]  # torch leaves its result open
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .errors import BackendError, GraphError, RuleError

try:
    from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
except ImportError:  # a torch without them: graph modules write their code when they are made
    _LazyGraphModule, _use_lazy_graph_module = torch.fx.GraphModule, contextlib.nullcontext

OpOverload = torch._ops.OpOverload
OP_TYPES: tuple[type, ...] = (OpOverload, torch._ops.OpOverloadPacket)
TreeSpec = pytree.TreeSpec
DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
_aten = torch.ops.aten


def _batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> Any:
    """`native_batch_norm` writes its running statistics and its schema hides that; this form says it. Same kernel."""
    if mean is None:
        return _aten._native_batch_norm_legit.no_stats(x, weight, bias, training, momentum, eps)
    return _aten._native_batch_norm_legit.default(x, weight, bias, mean, var, training, momentum, eps)


def _decompositions() -> dict[Any, Callable[..., Any]]:
    hidden_on_cuda = [_aten.cudnn_batch_norm, _aten.cudnn_batch_norm_backward]
    return {**get_decompositions(hidden_on_cuda), _aten.native_batch_norm.default: _batch_norm}


def tree_flatten(value: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], TreeSpec]:
    """Leaves of a nested container and its structure."""
    return pytree.tree_flatten(value, is_leaf=is_leaf)


def tree_flatten_with_path(
    value: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[tuple[str, Any]], TreeSpec]:
    """Like `tree_flatten`, each leaf with its path as text."""
    leaves, spec = pytree.tree_flatten_with_path(value, is_leaf=is_leaf)
    return [(pytree.keystr(path), leaf) for path, leaf in leaves], spec


def tree_unflatten(leaves: Sequence[Any], spec: TreeSpec) -> Any:
    """Inverse of `tree_flatten`."""
    return pytree.tree_unflatten(list(leaves), spec)


def write_spec(spec: TreeSpec) -> str:
    """A structure as text that `read_spec` reads back.

    Raises:
        NotImplementedError: it has a container that torch knows no name for.
    """
    return pytree.treespec_dumps(spec)


def read_spec(text: str) -> TreeSpec:
    """Inverse of `write_spec`."""
    return pytree.treespec_loads(text)


def fake_mode() -> FakeTensorMode:
    """A fake mode with static shapes in which scalars read by optimizers stay symbolic."""
    shape_env = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=False)
    return FakeTensorMode(
        allow_fallback_kernels=True, allow_non_fake_inputs=True, shape_env=shape_env, static_shapes=True
    )


def is_fake(value: object) -> bool:
    """True for a tensor without storage that belongs to a trace."""
    return isinstance(value, FakeTensor)


def known_constant(value: torch.Tensor) -> bool:
    """True when a traced tensor's value was fixed by a literal in the user's code."""
    return isinstance(value, FakeTensor) and value.constant is not None


def traced_node(value: torch.Tensor) -> tuple[torch.fx.Node, torch.nn.Module] | None:
    """The node of the trace under way that made `value`, and the module that holds the trace's constants."""
    mode = get_proxy_mode()
    tracer: Any = mode.tracer if mode is not None else None
    slot: Any = get_proxy_slot(value, tracer, None) if tracer is not None else None
    return (slot.proxy.node, tracer.root) if slot is not None and tracer is not None else None


@contextlib.contextmanager
def outside_of_trace() -> Generator[None]:
    """Inside, operations on real tensors really run, and the trace under way does not see them."""
    with _disable_current_modes():
        yield


@contextlib.contextmanager
def unobserved() -> Generator[None]:
    """Inside, operations on real tensors really run, and neither a trace nor a torch function mode sees them."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def storage_key(value: torch.Tensor) -> int:
    """The same for all tensors that share memory, fake ones included."""
    return value.untyped_storage()._cdata


@contextlib.contextmanager
def tensor_only_optimizers() -> Generator[None]:
    """`torch.compiler.is_compiling()` is true inside, so torch.optim takes its tensor-only form."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def note_on_nodes(**notes: object) -> None:
    """Nodes traced from here on carry these notes; None removes one."""
    custom = {**fx_traceback.current_meta.get("custom", {}), **notes}
    fx_traceback.current_meta["custom"] = {k: v for k, v in custom.items() if v is not None}


def noted(key: str) -> Any:
    """A note as it stands now."""
    return fx_traceback.current_meta.get("custom", {}).get(key)


@contextlib.contextmanager
def patched_for_tracing(
    on_backward: Callable[[Sequence[Any]], None],
    on_zero_grad: Callable[[Sequence[Any]], None],
    on_rng: tuple[Callable[[torch.Tensor], None], Callable[[torch.Tensor], None]],
) -> Generator[None]:
    """The one place that patches torch, undone on leaving: watches backwards and gradients being dropped.

    Nodes made inside a backward carry the note `backward`. `on_backward` sees the tensors a backward starts from,
    `on_zero_grad` the parameters whose gradient is set to None, `on_rng` states of the generator, read and set.
    """
    places = cast(tuple[Any, ...], (torch.autograd, torch.autograd.graph))
    engine = torch.autograd.graph._engine_run_backward

    def backward(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        on_backward(outputs)
        nested, module = noted("backward"), noted("module")
        note_on_nodes(backward=True)
        try:
            return engine(outputs, *args, **kwargs)
        finally:
            note_on_nodes(backward=nested, module=module)  # a checkpoint leaves modules by an exception

    def watch_zero_grad(owner: type, parameters: Callable[[Any], list[Any]]) -> Callable[[], None]:
        original = owner.__dict__["zero_grad"]

        def zero_grad(self: Any, set_to_none: bool = True) -> None:
            if set_to_none:
                on_zero_grad(parameters(self))
            original(self, set_to_none)

        owner.zero_grad = zero_grad
        return lambda: setattr(owner, "zero_grad", original)

    undo = [
        _skip_idle_conversions(),
        _skip_distribution_checks(),
        watch_zero_grad(torch.optim.Optimizer, lambda o: [p for g in o.param_groups for p in g["params"]]),
        watch_zero_grad(torch.nn.Module, lambda m: list(m.parameters())),
        _watch_generator(*on_rng),
    ]
    for place in places:
        place._engine_run_backward = backward
    try:
        yield
    finally:
        for place in places:
            place._engine_run_backward = engine
        for restore in undo:
            restore()


def _watch_generator(
    on_get: Callable[[torch.Tensor], None], on_set: Callable[[torch.Tensor], None]
) -> Callable[[], None]:
    """Tells when the state of the CPU generator is read and set, until undone; a trace draws nothing from it."""
    get, set_ = torch.get_rng_state, torch.set_rng_state

    def get_rng_state() -> torch.Tensor:
        state = get()
        on_get(state)
        return state

    def undo() -> None:
        torch.get_rng_state, torch.set_rng_state = get, set_

    torch.get_rng_state, torch.set_rng_state = get_rng_state, on_set
    return undo


def _skip_idle_conversions() -> Callable[[], None]:
    """`module.to(what it is already)` changes nothing, and fakes cannot be swapped: it is skipped until undone."""
    original = cast(Callable[..., Any], torch.nn.Module._apply)

    def apply(self: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        held = [*self.parameters(recurse), *self.buffers(recurse)]
        return self if all(fn(tensor) is tensor for tensor in held) else original(self, fn, recurse)

    torch.nn.Module._apply = apply
    return lambda: setattr(torch.nn.Module, "_apply", original)


def _skip_distribution_checks() -> Callable[[], None]:
    """torch.distributions reads the values of its arguments to check them, unless it is asked not to."""
    before = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(False)
    return lambda: torch.distributions.Distribution.set_default_validate_args(before)


_FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
_fused_library = torch.library.Library("aten", "IMPL")


def _shapes_for_fused_optimizers() -> None:
    """Fused optimizers with a tensor learning rate have no shape function; in place there is nothing to do."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    for name in _FUSED:
        for overload in getattr(torch.ops.aten, name).overloads():
            full = f"aten::{name}" + (f".{overload}" if overload != "default" else "")
            if not torch._C._dispatch_has_kernel_for_dispatch_key(full, "Meta"):
                _fused_library.impl(full.removeprefix("aten::"), nothing, "Meta")


def trace(
    fn: Callable[..., Any], inputs: Sequence[Any], forms: Mapping[Any, Callable[..., Any]]
) -> torch.fx.GraphModule:
    """One ATen graph of `fn(*inputs)`, in-place ops included; nodes carry the notes of `note_on_nodes`.

    `forms` gives ops in other terms; a form that returns NotImplemented leaves the op as it is.
    """
    _shapes_for_fused_optimizers()
    with fx_traceback.preserve_node_meta():
        fx_traceback.current_meta.pop("custom", None)
        table = {**_decompositions(), **forms}
        with _use_lazy_graph_module(True):
            return make_fx(fn, table, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)


def graph_module(root: torch.nn.Module, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """A module of `graph` that writes its code when it is called.

    `torch.fx.GraphModule` writes code when it is made, which for deep steps takes longer than any pass over them, and a
    captured graph is not run as a module (`torch.fx._lazy_graph_module`, 2.11 to 2.15).
    """
    return _LazyGraphModule(root, graph)


def trace_plain(fn: Callable[..., Any], fakes: Sequence[Any]) -> torch.fx.Graph:
    """`fn` on fake tensors as a graph of ATen calls."""
    return make_fx(fn)(*fakes).graph


@contextlib.contextmanager
def without_onednn() -> Generator[None]:
    """OneDNN's recurrent layers need a workspace that autograd alone makes; other layers trace alike without it."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


class _Replay(torch.fx.Interpreter):
    """Runs a graph as functionalization needs it: fused optimizers functional, since it refuses their empty lists."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        packet = getattr(getattr(target, "_overloadpacket", None), "__name__", "")
        if packet not in _FUSED:
            return super().call_function(target, args, kwargs)
        functional = getattr(getattr(torch.ops.aten, packet.removesuffix("_")), target._overloadname)
        written = [a.name for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        given = {**dict(zip((a.name for a in target._schema.arguments), args, strict=False)), **kwargs}
        for name, new in zip(written, functional(*args, **kwargs), strict=True):
            if name != "grads" or given.get("grad_scale") is not None:
                for tensor, value in zip(given[name], new, strict=True):
                    tensor.copy_(value)
        return None


def functionalize(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> torch.fx.GraphModule:
    """The same graph without mutation: in-place ops become functional, inputs are updated by trailing copies."""
    with fx_traceback.preserve_node_meta():

        def run(*args: Any) -> Any:
            return _Replay(module).run(*args)

        return make_fx(
            torch.func.functionalize(run, remove="mutations"), tracing_mode="fake", _allow_non_fake_inputs=True
        )(*inputs)


def untracked(value: torch.Tensor) -> torch.Tensor:
    """A plain fake tensor like `value`, free of parameter and autograd state."""
    return value.detach()


def count_our_collectives() -> None:
    """Let torch's CommDebugMode count a gather's out variant and an all-reduce in place: its table lacks them."""
    with contextlib.suppress(ImportError, AttributeError):
        from torch.distributed.tensor.debug import _comm_mode

        table: dict[Any, Any] = _comm_mode.NATIVE_TO_PY_MAPPING
        native = torch.ops._c10d_functional
        table.setdefault(native.all_gather_into_tensor_out, table[native.all_gather_into_tensor])
        table.setdefault(native.all_reduce_, table[native.all_reduce])


def default_store() -> Any:
    """The key-value store of the default process group."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def storage_holders(tensor: torch.Tensor) -> int:
    """How many tensors, and Python objects, hold the memory of `tensor`, this count's own included.

    `torch._C._storage_Use_Count` (2.11 to 2.15): there is no public way to ask whether memory is used by others.
    """
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def start_exchange(value: torch.Tensor, out: torch.Tensor, group: str) -> torch.Tensor:
    """Equal rows of `value` go to the ranks of a registered group, theirs into `out`; `wait_tensor(out)` waits for it.

    As `_c10d_functional.all_to_all_single`, which has no variant that is given its result (2.11 to 2.15).
    """
    c10d = cast(Any, torch._C)._distributed_c10d
    work = c10d._resolve_process_group(group).alltoall_base(out, value, [], [])
    c10d._register_work(out, work)
    return out


def forget_shardings() -> None:
    """Drop DTensor's table of shardings met, which holds meshes and, through them, process groups.

    `torch._C._clear_DTensor_sharding_propagator_cache` (2.11 to 2.15): there is no public way to empty it.
    """
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()


def strided_shard(dim: int, split_factor: int) -> Any:
    """DTensor's placement for an inner axis sharding a dim that an outer-in-layout axis shards too."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


def dtensor(
    local: torch.Tensor, devices: Any, placements: Sequence[Any], shape: Sequence[int], stride: Sequence[int]
) -> Any:
    """A DTensor around this rank's piece, wherever that lies: `DTensor.from_local` moves it to the mesh's devices."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    whole = TensorMeta(torch.Size(shape), tuple(stride), local.dtype)
    spec = DTensorSpec(devices, tuple(placements), tensor_meta=whole)
    return cast(Any, DTensor)(local, spec, requires_grad=False)


def shard_of(placement: object) -> tuple[int, int] | None:
    """The dim that a placement shards and its split factor, 1 for a plain shard; None for other placements."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if not isinstance(placement, (Shard, _StridedShard)):
        return None
    known = cast(Any, placement)
    return int(known.dim), int(getattr(known, "split_factor", 1))


def inductor_compile(
    module: torch.fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any]
) -> Callable[..., Any]:
    """Compile a graph of tensors with TorchInductor; `options` are names of `torch._inductor.config`."""
    try:
        from torch._inductor import compile as compile_graph
    except ImportError as error:
        raise BackendError(
            f"backend 'inductor' is not in torch {torch.__version__}: {error}", next_step='use backend="eager"'
        ) from error
    mode = next((t.fake_mode for t in example_inputs if isinstance(t, FakeTensor)), None) or fake_mode()
    with tracing(TracingContext(mode)):  # Inductor keeps graphs on disk only where there is such a context
        return cast(Callable[..., Any], compile_graph(module, list(example_inputs), dict(options)))


def local_tensor(value: torch.Tensor) -> torch.Tensor:
    """The tensor this rank holds of a DTensor, by reference; other tensors as they are."""
    inner = getattr(value, "_local_tensor", None)
    return value.detach() if inner is None else inner


def is_plain(tensor: torch.Tensor) -> bool:
    """True for a strided tensor that holds all its values itself; ops on others may crash."""
    odd = tensor.is_quantized or tensor.is_conj() or tensor._is_zerotensor()
    return type(tensor) is torch.Tensor and tensor.layout == torch.strided and not odd


def is_op(target: object) -> TypeGuard[OpOverload[..., Any]]:
    """True for one overload of a torch op."""
    return isinstance(target, OpOverload)


def overload_of(op: object) -> Any:
    """The overload that a graph calls: of a custom op or of an op with one overload; anything else as it is."""
    found: Any = getattr(op, "_opoverload", op)
    if not isinstance(found, torch._ops.OpOverloadPacket):
        return found
    packet = cast(Any, found)
    names: list[str] = packet.overloads()
    return getattr(packet, names[0] if len(names) == 1 else "default")


def schema_of(target: object) -> Any:
    """The schema of an ATen op.

    Raises:
        GraphError: `target` is not an op overload.
    """
    if not is_op(target):
        raise GraphError(f"{target!r} is not a torch op overload")
    return target._schema


def functional_form(target: OpOverload[..., Any]) -> OpOverload[..., Any] | None:
    """The op that returns what an in-place or out form writes; None for a functional op, or where there is none."""
    schema = target._schema
    if not schema.is_mutable:
        return None
    base = schema.name.partition("::")[2]
    plain = base[:-1] if base.endswith("_") and not base.endswith("__") else base
    wanted = [str(a.type) for a in schema.arguments if not a.is_out]
    for full in (plain, f"{plain}_functional"):
        packet = getattr(getattr(torch.ops, target.namespace), full, None)
        for name in packet.overloads() if packet is not None else ():
            found = getattr(packet, name)
            if not found._schema.is_mutable and [str(a.type) for a in found._schema.arguments] == wanted:
                return found
    return None


def changes_shape(target: OpOverload[..., Any]) -> bool:
    """True for an in-place op that makes its tensor another view, like `unsqueeze_`."""
    return torch.Tag.inplace_view in target.tags


def is_fused_optimizer(target: OpOverload[..., Any]) -> bool:
    """True for the functional form of a fused optimizer, which writes its gradients only to unscale them."""
    return f"{target._schema.name.removeprefix('aten::')}_" in _FUSED


def attribute(module: torch.nn.Module, target: str) -> Any:
    """What a `get_attr` node of a module's graph stands for."""
    found: Any = module
    for name in target.split("."):
        found = getattr(found, name)
    return found


def parameters_of(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """The parameters a module holds itself, to read and to replace."""
    return module._parameters


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """The buffers a module holds itself, to read and to replace."""
    return module._buffers


def children_of(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """The modules a module holds itself, to read and to replace."""
    return module._modules


GETITEM = operator.getitem


def set_operands(node: torch.fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What a new node reads. `Graph.create_node` opens all arguments to warn of symbolic numbers (since torch 2.13),
    and assigning `node.args` takes the node out of a table and puts it back: most of what a copy of a graph takes.

    In place of the private method: `node.args = args; node.kwargs = kwargs`. It is there in torch 2.11 to 2.15.
    """
    cast(Any, node)._update_args_kwargs(args, kwargs)


def is_getitem(target: object) -> bool:
    """True for the node that picks one output of a multi-output op."""
    return target is GETITEM


def is_compiled(module: torch.nn.Module) -> bool:
    """True after `module.compile()`."""
    return getattr(module, "_compiled_call_impl", None) is not None


def overloads(namespace: str) -> list[OpOverload[..., Any]]:
    """Every overload of a namespace that has a schema."""
    names = [n.partition("::")[2] for n in torch._C._dispatch_get_all_op_names() if n.startswith(f"{namespace}::")]
    found: dict[Any, None] = {}
    for name in sorted(names):
        packet, _, overload = name.partition(".")
        op = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload or "default", None)
        if is_op(op):
            found[op] = None
    return list(found)


def runs_on_cpu(target: OpOverload[..., Any]) -> bool:
    """False for an op that only accelerators have; `overrideable` ones only say so when they are called."""
    schema = target._schema
    if "overrideable" in schema.name:
        return False
    name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    return torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CPU")


def op_infos() -> Sequence[Any]:
    """PyTorch's own database of ops with sample arguments.

    Raises:
        RuleError: it cannot be imported: it needs a package that torch itself does not.
    """
    try:
        from torch.testing._internal import common_methods_invocations as known
    except ImportError as error:
        raise RuleError(
            f"PyTorch's database of sample arguments cannot be imported: {error}",
            "the packages that torch's own tests need",
            "pip install 'wholestep[dev]', or check one op with ws.check_rule(op, ...)",
        ) from error
    return cast(Any, known).op_db


class Recorder(TorchDispatchMode):
    """Has `call` make every call of an op below autograd."""

    def __init__(self, call: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self.call = call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs or {})


def dynamo_backend(name: str) -> Callable[..., Any]:
    """The `torch.compile` backend of that name.

    Raises:
        BackendError: there is none.
    """
    import torch._dynamo as dynamo
    from torch._dynamo.exc import InvalidBackend

    try:
        return dynamo.lookup_backend(name)
    except InvalidBackend as error:
        known = ", ".join(dynamo.list_backends())
        raise BackendError(f"there is no torch.compile backend {name!r}", f"one of {known}, or a callable") from error


def inductor_settings(mode: str | None = None, options: Mapping[str, Any] | None = None, **_: Any) -> dict[str, Any]:
    """How the backend "inductor" is told the `mode` and `options` that `torch.compile` was called with."""
    from torch._inductor import list_mode_options

    settings = {**(list_mode_options(mode) if mode else {}), **(options or {})}
    return {"config_patches": settings} if settings else {}


def switch_off_own_splitter() -> bool:
    """Keep torch from splitting graphs of DDP models in this process; True if it was going to."""
    import torch._dynamo.config as config

    mode: Any = config.optimize_ddp
    if mode not in (True, "ddp_optimizer"):
        return False
    config.optimize_ddp = False
    return True


def split_by_torch() -> bool:
    """True while torch's own splitter compiles the parts that it has cut."""
    context = TracingContext.try_get()
    return context is not None and context.ddp_optimizer_ctx is not None


def ddp_in_use() -> torch.nn.parallel.DistributedDataParallel | None:
    """The DDP module whose forward runs now; the inner one where they are nested."""
    return torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()


def buckets_are_settled(ddp: torch.nn.parallel.DistributedDataParallel) -> bool:
    """True once the reducer has made its buckets anew, in the order in which gradients first came."""
    return ddp._has_rebuilt_buckets


def first_bucket_bytes() -> int:
    """DDP's default limit of the bucket that is reduced first, in bytes."""
    return int(cast(Any, torch.distributed)._DEFAULT_FIRST_BUCKET_BYTES) if torch.distributed.is_available() else 2**20


def give_origin(whole: torch.fx.GraphModule, part: torch.fx.GraphModule) -> None:
    """Tell `part`, cut out of dynamo's graph `whole`, where in the user's program its inputs come from."""
    sources = {node.name: getattr(node, "_dynamo_source", None) for node in whole.graph.find_nodes(op="placeholder")}
    for node in part.graph.find_nodes(op="placeholder"):
        node._dynamo_source = sources.get(node.name)
    for name in ("_param_name_to_source", "_source_to_user_stacks", "compile_subgraph_reason"):
        if hasattr(whole, name):
            setattr(part, name, getattr(whole, name))


class PartContext:
    """While one part of a dynamo graph is compiled: what later stages note about it stays with it."""

    def __init__(self) -> None:
        self._notes: Any = copy.copy(TracingContext.get())
        self._notes.fw_metadata = None

    @contextlib.contextmanager
    def compiling(self) -> Generator[None]:
        """The first call of what aot_autograd compiles inside gives fakes with the strides of the real results."""
        self._notes.fakify_first_call = True
        try:
            with tracing(self._notes):
                yield
        finally:
            self._notes.fakify_first_call = False

    @property
    def through_aot(self) -> bool:
        """True if aot_autograd compiled the part."""
        return self._notes.fw_metadata is not None

    def call(self, compiled: Callable[..., Any], fakes: Sequence[Any]) -> Any:
        """The first call, on fakes."""
        mode: Any = self._notes.fake_mode
        before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
        set_tracing: Any = cast(Any, torch._C)._autograd._saved_tensors_hooks_set_tracing
        held = set_tracing(True)
        try:
            with mode:
                return compiled(*fakes)
        finally:
            set_tracing(held)
            mode.allow_non_fake_inputs = before


def is_grad_switch(target: object) -> bool:
    """True for what dynamo calls where `no_grad` or `enable_grad` begins or ends."""
    return target is torch._C._set_grad_enabled


def in_dynamo() -> bool:
    """True while dynamo has a graph compiled."""
    context = TracingContext.try_get()
    return context is not None and context.fake_mode is not None
