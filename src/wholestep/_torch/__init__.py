"""Every private torch name wholestep uses, and why. Checked with torch 2.11 to 2.15.

The public names of the modules here are the names of this package.

Each entry: the name (first torch version), its purpose; the public API that would replace it.

- fx.experimental.proxy_tensor.get_proxy_mode, disable_proxy_modes_tracing (2.0): adds an input for a Python number
  during a trace (`python_hooks`); a tracer that accepts new inputs.
- fx.experimental.proxy_tensor.make_fx (1.12) and its `_disable_torch_fn_metadata_mode` (2.11): traces a whole step into
  one ATen graph; a public joint tracer.
- fx.experimental.symbolic_shapes.ShapeEnv.create_symbol, create_symintnode, guards, replacements, var_to_range,
  _get_sloc, _get_stack_summary, DimDynamic (2.1), _guards.SLoc, _dynamo.source.ConstantSource,
  utils._sympy.printers.PythonPrinter (2.0): sizes of the batch as symbols, and what was compared of them, with the
  user's line (`symbols`), and no search for one that nobody reads (`tracing`); a public way to do so.
- ShapeEnv.evaluate_expr, create_unbacked_symint, ignore_fresh_unbacked_symbols, deferred_runtime_asserts,
  _constrain_range_for_size, GuardOnDataDependentSymNode (2.4): rows that are counted (`symbols`); the same way.
- fx.experimental.proxy_tensor.fetch_sym_proxy, PythonKeyTracer.create_arg, and __sym_dispatch__ of the mode (2.0):
  sizes are arguments of nodes and not nodes (`dispatch`); an option of make_fx. sym_node.SymNode.eq: equal at once.
- fx.experimental.proxy_tensor.ProxyTorchDispatchMode, _ProxyTensor, extract_val, track_tensor_tree (2.0), and both
  modes' __torch_dispatch__: records ops in half the time (`dispatch`); a tracer with less overhead.
- overrides._get_current_function_mode (2.0): whether a mode is still on torch's stack when it is left (`undo`).
- utils._python_dispatch._get_current_dispatch_mode_stack (2.0), _C._len_torch_function_stack (1.13): whether a mode of
  the user's sees the ops of an optimizer, whose loops are optim's functions `_single_tensor_*` (1.12) (`op_tapes`);
  public forms.
- _ops.OpOverload, OpOverloadPacket (1.12): the targets of graph nodes; public names of the two classes.
- OpOverload._op (1.12): calls an op without a frame of Python; a call of the overload that has none.
- nodes' _update_args_kwargs (2.11), fx.Graph._target_to_str (1.10): creates nodes without a search for symbolic
  numbers in their arguments; an option of `create_node`.
- loggers of _subclasses, _dynamo, _decomp, _functorch, fx.experimental (2.0): silenced during a trace; errors without
  logs.
- _subclasses.fake_tensor.FakeTensorMode, ShapeEnv (2.0): tensors without storage while tracing, and a table of results
  that never forgets; a public fake mode.
- FakeTensor's attributes, _C._DisableTorchDispatch, _get_dispatch_mode, _set_throw_on_mutable_data_ptr (2.1), and
  Tensor._make_subclass (1.7): makes results of ops on fake tensors without the mode (`fake_results`); a faster mode.
- nn.Module._parameters, _buffers, _modules (0.1): replaces members of a module; public writable views.
- compiler._is_compiling_flag (2.1): selects the capturable form of torch.optim; a public switch.
- utils.checkpoint._is_compiling (2.4): selective checkpointing recomputes while it is traced; a public switch.
- autograd.graph._engine_run_backward (2.2): marks nodes made in a backward; node.meta["autograd_backward"] on every op.
- _decomp.get_decompositions (1.13): batch norm's hidden write into its statistics; schemas that name every mutation.
- _C._get_mkldnn_enabled, _set_mkldnn_enabled (1.2): torch.backends.mkldnn.enabled, which torch's test library locks,
  and whose context manager warns about TF32; a public switch without either.
- library.Library("aten"), _dispatch_has_kernel (1.13): shape functions that fused optimizers lack; the same in torch.
- fx._lazy_graph_module (2.2): graph modules that generate code at their first call; an option of GraphModule.
- utils._pytree (1.8): flattens arguments and results of a step, serializes their structure; torch.utils.pytree.
- _C.DisableTorchFunction (1.13): reads values during a trace; a public switch for torch function modes.
- _inductor.compile (2.0): compiles the arithmetic of a local graph; a public graph compiler.
- _inductor.async_compile.AsyncCompile.wait (2.0): called once for all functions of a step, so that their kernels are
  built in parallel; a way to compile several graphs together.
- utils._triton.has_triton (2.1): whether Triton is there; a public function.
- distributed.distributed_c10d._get_default_store (1.13): ranks compare programs in it; a public store accessor.
- distributed.distributed_c10d._abort_process_group (2.6), _set_pg_timeout (2.3): ends NCCL collectives that wait for a
  rank that failed, and sets when NCCL's watchdog does; public forms of both.
- _C._dispatch_has_computed_kernel_for_dispatch_key (1.13): which ops have a CPU kernel, to check rules; a public list.
- _C._cuda_endAllocateToPool, _cuda_releasePool (2.2): a failed capture leaves the allocator recording; a capture that
  cleans up. ProcessGroup.shutdown (2.4) is replaced by one that lets go of recordings first; a hook.
- _C._storage_Use_Count (2.0): whether a storage has other users; a public count.
- _C._distributed_c10d._resolve_process_group, _register_work (2.3): an all-to-all into existing memory, with the wait
  of a functional collective, several in one launch with one wait, and sends in a group by name; functional forms.
- distributed.checkpoint.filesystem._StorageInfo (2.0): an index by which torch reads the tensors of a checkpoint; a
  public writer that takes where they are.
- distributed.tensor.debug._comm_mode.NATIVE_TO_PY_MAPPING (2.5): CommDebugMode counts all_gather_into_tensor_out and
  all_reduce_; entries for both.
- distributed._symmetric_memory (2.5): products fused with a gather or a reduce-scatter (`symmetric_memory`); a public
  module.
- distributed.tensor._dtensor_spec.DTensorSpec (2.5): a DTensor on GPUs with its local tensor in host memory; a
  from_local that does not move the local tensor. Code of DTensor.__torch_dispatch__ and utils._python_dispatch's
  TorchDispatchMode (1.13): ops on a subclass of DTensor, which torch 2.11 does not dispatch; torch since does.
- _C._swap_tensor_impl (2.2), DTensor's _local_tensor and _spec (2.5): a parameter that becomes a DTensor, as the same
  object; a `torch.utils.swap_tensors` for objects of two layouts.
- distributed.tensor.placement_types._StridedShard (2.5): FSDP on top of TP on one dim; ordered placements.
  Shard._local_shard_size_and_offset (2.8): a tensor that one rank has is stored as shards; such a placement.
- _dynamo.lookup_backend (2.0), _inductor.list_mode_options (2.0): inner backends by name, with options; torch.compile
  of a subgraph.
- _dynamo.config.optimize_ddp (2.0): disables torch's DDP splitter in favour of ours; an attribute of the backend.
- _dynamo.trace_rules.add (2.2): torch.compile leaves the code of a sharded parameter out; a public decorator of files.
- DistributedDataParallel._get_active_ddp_module (1.13), _has_rebuilt_buckets (1.13), and in torch.distributed
  _DEFAULT_FIRST_BUCKET_BYTES (1.8): the running DDP model, the state of its buckets, its first cap; properties.
- _guards.TracingContext, tracing (2.0): compiles each part of a split graph in its own context, and returns fakes with
  the real strides; a public way to compile one graph as several.
- _C._autograd._saved_tensors_hooks_set_tracing (2.3): disables hooks on saved tensors while a part runs on fakes.
- _C._functorch.peek_interpreter_stack (2.0): whether a `torch.func` transform is active; a public function.
- _C._set_grad_enabled (1.0): the node that switches gradients in dynamo's graphs; the public class, traced.
- optim._adafactor (2.5), nn.modules.batchnorm._BatchNorm (1.0), amp.GradScaler's _scale, _growth_tracker,
  _per_optimizer_states, _unscale_grads_ (2.3): methods that read values are replaced by traceable forms (`replaced`);
  traceable forms in torch, like capturable=True of its optimizers.
- optim.optimizer._foreach_supported_types, utils._foreach_utils._foreach_supported_types (2.0): torch takes foreach
  kernels for fake tensors too, as it would for real ones; a registry of types.
- _dynamo.eval_frame.OptimizedModule (2.0): calls the module that torch.compile wraps; a stance for it.
- tensors' _backward_hooks (0.4), _post_accumulate_grad_hooks (2.1), modules' _forward_hooks and their like (0.1),
  optimizers' _optimizer_step_pre_hooks (2.0): detects the user's hooks, and moves or copies them with a
  parameter; a list.
- nodes' _dynamo_source (2.5), modules' _param_name_to_source (2.1): origin of the inputs of a part; node.meta.
"""

# ruff: noqa: F403  # the lists of names would be as long as the modules' own
from .attributes import *
from .connections import *
from .cuda_graphs import *
from .distributed import *
from .dynamo import *
from .fake_results import *
from .held import *
from .op_schemas import *
from .op_tapes import *
from .other_threads import *
from .placed import *
from .python_hooks import *
from .replaced import *
from .symbols import *
from .symmetric_memory import *
from .tracing import *
from .types_shown import *
from .undo import *
