"""Every private or unstable torch interface that hgc uses, in one place; tests/test_torch_compat.py proves each entry."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
import torch.overrides
import torch.utils._pytree
import torch.utils._sympy.functions
from torch import Tensor, nn

# The operators, not their Python wrappers: wrappers were renamed in 2.13, and these can be traced by torch.compile.
_raw: Any = torch.ops._c10d_functional


def all_reduce(x: Tensor, op: str, group_name: str) -> Tensor:
    """A new tensor; ``op`` is ``"sum"`` or ``"max"``; below autograd, because torch gives it another gradient than hgc means."""
    result: Tensor = _raw.wait_tensor(_raw.all_reduce(x.contiguous(), op, group_name))
    return result


def start_all_reduce(x: Tensor, op: str, group_name: str) -> Tensor:
    """:func:`all_reduce` that is only under way: nothing may read the result before :func:`finished` has returned it."""
    result: Tensor = _raw.all_reduce(x.contiguous(), op, group_name)
    return result


def finished(started: Tensor) -> Tensor:
    """The result of a started collective."""
    result: Tensor = _raw.wait_tensor(started)
    return result


def finished_when_read(started: Tensor) -> Tensor:
    """A tensor that waits for a started collective by itself, as soon as an operator reads it."""
    lazy: Tensor = torch.distributed._functional_collectives.AsyncCollectiveTensor(started)
    return lazy


def settled(x: Tensor) -> Tensor:
    """A plain tensor of what :func:`finished_when_read` gave; any other tensor as it is."""
    if not isinstance(x, torch.distributed._functional_collectives.AsyncCollectiveTensor):
        return x
    result: Tensor = x.trigger_wait()  # type: ignore[no-untyped-call]
    return result


def all_gather_flat(x: Tensor, ranks: int, group_name: str) -> Tensor:
    """``[n, ...]`` on each rank to ``[ranks * n, ...]``; below autograd."""
    result: Tensor = _raw.wait_tensor(_raw.all_gather_into_tensor(x.contiguous(), ranks, group_name))
    return result


def reduce_scatter_flat(x: Tensor, ranks: int, group_name: str) -> Tensor:
    """Sum of ``[ranks * n, ...]``, of which each rank keeps its ``[n, ...]``; below autograd."""
    result: Tensor = _raw.wait_tensor(_raw.reduce_scatter_tensor(x.contiguous(), "sum", ranks, group_name))
    return result


def all_to_all_flat(x: Tensor, ranks: int, group_name: str) -> Tensor:
    """``[ranks * n, ...]``, whose r-th ``n`` rows go to rank r; below autograd."""
    splits = [x.size(0) // ranks] * ranks
    result: Tensor = _raw.wait_tensor(_raw.all_to_all_single(x.contiguous(), splits, splits, group_name))
    return result


def start_shift(x: Tensor, rank: int, ranks: int, group_name: str) -> Tensor:
    """Send to the next rank of a ring and receive as much from the one before; :func:`finished` gives what came, flat; below autograd.

    An all-to-all whose other parts are empty: NCCL makes one send and one receive of it, and unlike those it works everywhere.
    """
    flat = x.reshape(-1).contiguous()
    to = [0] * ranks
    to[(rank + 1) % ranks] = flat.numel()
    source = [0] * ranks
    source[(rank - 1) % ranks] = flat.numel()
    result: Tensor = _raw.all_to_all_single(flat, source, to, group_name)
    return result


def has_fused_attention(q: Tensor, v: Tensor) -> bool:
    """Can :func:`fused_attention` take q [B, H, S, D] and values like v [B, H, T, E]?"""
    if q.device.type == "cpu":
        return q.size(3) == v.size(3) and q.is_floating_point()
    if q.device.type != "cuda" or q.size(3) != v.size(3) or q.size(3) % 8:
        return False
    cuda: Any = torch.backends.cuda
    return bool(cuda.can_use_flash_attention(cuda.SDPAParams(q, q, q, None, 0.0, False, False)))


def fused_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The flash kernel below autograd: its result, and the logarithm of each row's softmax sum [B, H, S], at least float32."""
    kernels: Any = torch.ops.aten
    if q.device.type == "cpu":
        out, sums = kernels._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return out, sums
    out, sums, *_ = kernels._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    return out, sums


def fused_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; ``out`` and ``sums`` may be those of a softmax over more columns than these."""
    kernels: Any = torch.ops.aten
    sums = sums.contiguous()
    if q.device.type == "cpu":
        backward = kernels._scaled_dot_product_flash_attention_for_cpu_backward
        grad_q, grad_k, grad_v = backward(grad, q, k, v, out, sums, 0.0, causal, scale=scale)
        return grad_q, grad_k, grad_v
    unused = q.new_empty(0, dtype=torch.int64)  # the state of dropout
    backward = kernels._scaled_dot_product_flash_attention_backward
    lengths = q.size(2), k.size(2)
    grad_q, grad_k, grad_v = backward(grad, q, k, v, out, sums, None, None, *lengths, 0.0, causal, unused, unused, scale=scale)
    return grad_q, grad_k, grad_v


@contextmanager
def threaded_world() -> Iterator[Any]:
    """Let the threads started inside be the ranks of a process group (backend ``"threaded"``), for tests.

    Yields a function that a failing rank calls with its exception, so that the other ranks leave their collectives.
    """
    # Each thread needs its own registry of groups and its own default group; torch offers that to its own tests only.
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    c10d: Any = torch._C._distributed_c10d
    group: Any = threaded.ProcessLocalGroup
    c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()  # type: ignore[no-untyped-call]
    try:
        yield group.exception_handle
    finally:
        group.reset()
        threaded._uninstall_threaded_pg()  # type: ignore[no-untyped-call]
        c10d._set_thread_isolation_mode(False)


def local_store() -> Any:
    """A store for ranks within this process."""
    return dist.HashStore()  # type: ignore[attr-defined]


# Sizes that export computes are sympy expressions in these functions; hgc rewrites them in sympy's own.
size_functions: Any = torch.utils._sympy.functions


def fake_tensor_mode() -> Any:
    """A mode whose tensors have sizes (symbolic ones too) and a device but no data; real tensors may be mixed in as constants."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv(tracked_fakes=[], trace_asserts=True), allow_non_fake_inputs=True, export=True)


@contextmanager
def exporting_in(fake_mode: Any) -> Iterator[None]:
    """Make ``torch.export`` use this fake mode, so that a model whose parameters are fake tensors can be exported."""
    from torch._guards import TracingContext, tracing

    with tracing(TracingContext(fake_mode)):
        yield


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """``target.copy_(source)`` for many pairs in few kernels; the same operator that torch's own optimizers use."""
    if targets:
        torch._foreach_copy_(targets, sources)


def size_guards(fake_mode: Any) -> list[Any]:
    """The relations between sizes (sympy booleans) that tracing in this fake mode has relied on."""
    return [guard.expr for guard in fake_mode.shape_env.guards]


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Names of the module's own buffers that no state dict holds."""
    return set(module._non_persistent_buffers_set)


def forward_hooks(module: nn.Module) -> list[Any]:
    """The functions that run before and after the module's forward."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


# Nested arguments to a flat list and back, with the types that libraries (transformers) registered there.
flatten_tree: Any = torch.utils._pytree.tree_flatten
unflatten_tree: Any = torch.utils._pytree.tree_unflatten

# Targets of graph nodes: one overload of an operator; an operator that takes a graph (``no_grad`` regions of export).
OpOverload: Any = torch._ops.OpOverload
HigherOrderOperator: Any = torch._ops.HigherOrderOperator


def symbolic_mode() -> Any:
    """A fake tensor mode for measuring operators: sizes from :func:`symbolic_size` are expressions and results carry them along.

    An operator whose result's sizes or whose own choices depend on data raises. Results are not cached: keys of symbolic sizes cost more
    than running the operator again.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    environment = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    mode.cache_enabled = False
    return mode


def symbolic_size(fake_mode: Any, hint: int) -> torch.SymInt:
    """A new size of at least two, equal to no other; branches of Python code are taken as for ``hint``."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    context: Any = StatelessSymbolicContext([DimDynamic.DYNAMIC])
    with unset_fake_temporarily():
        size = fake_mode.from_tensor(torch.empty(hint, device="meta"), symbolic_context=context).shape[0]
    assert isinstance(size, torch.SymInt)
    return size


def fixed_sizes(fake_mode: Any) -> list[str]:
    """Names of symbolic sizes that some operator has pinned to a number or tied to another size."""
    return [str(symbol) for symbol in fake_mode.shape_env.replacements]


def storage_key(tensor: Tensor) -> int:
    """The same number for tensors that share memory, fake ones too, as long as one of them is alive."""
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def running_in(fake_mode: Any) -> Iterator[None]:
    """Run on the mode's tensors; composite operators through their Python forms, because the C++ ones pin symbolic sizes to numbers."""
    from torch._dispatch.python import enable_python_dispatcher

    with fake_mode, enable_python_dispatcher():
        yield


@contextmanager
def watching_calls(report: Any) -> Iterator[None]:
    """Call ``report(operator overload, args, kwargs, result)`` for every operator that reaches a kernel, in forward and backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            report(func, args, kwargs or {}, result)
            return result

    with Watching():  # type: ignore[no-untyped-call]
        yield


def counted_flops(func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """What torch's ``FlopCounterMode`` counts for a call of an operator overload: 0 for all but products; symbolic for symbolic sizes."""
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(func.overloadpacket)
    return formula(*args, **kwargs, out_val=result) if formula is not None else 0


def backward_splits(results: list[Tensor], inputs: list[Tensor]) -> bool:
    """Does every result depend on an input? Else :func:`backward_of_parameters` would miss gradients of those that do not."""
    from torch.distributed.pipelining import _backward as torch_backward

    node = torch_backward._get_grad_fn_or_grad_acc
    roots = [found for found in map(node, results) if found is not None]
    upwards = torch_backward.construct_reverse_graph(roots)
    dependent, _ = torch_backward.reverse_closure([found for found in map(node, inputs) if found is not None], set(), upwards)
    return all(root in dependent for root in roots)


def backward_of_inputs(
    results: list[Tensor], gradients: list[Tensor], inputs: list[Tensor], parameters: list[nn.Parameter]
) -> tuple[list[Tensor | None], Any]:
    """Gradients of ``inputs`` alone, and what :func:`backward_of_parameters` needs to go on from there; frees what neither needs.

    Only where :func:`backward_splits`.
    """
    from torch.distributed.pipelining._backward import stage_backward_input

    own = [result.clone() for result in results]  # torch detaches them in place, but the stage may have saved them, and they may be views
    found, groups = stage_backward_input(own, gradients, inputs, iter(parameters))
    rest, seen = [], set[Any]()
    for group in groups:
        # torch may leave a parameter in two groups, each of which would add its whole gradient
        group["params"] = group["params"] - seen
        seen |= group["params"]
        if group["params"] and group.get("grads") is not None:
            rest.append(group)
    return list(found), rest


def backward_of_parameters(parameters: list[nn.Parameter], rest: Any) -> None:
    """Add the gradients of ``parameters`` to ``grad``."""
    from torch.distributed.pipelining._backward import stage_backward_weight

    # parameters in front of all inputs share a part of the graph, which torch would free for the first of them
    stage_backward_weight(iter(parameters), rest, retain_graph=True)


class _Intercepting:
    """The operators of ``_raw``, each called through ``intercept``."""

    def __init__(self, operators: Any, intercept: Callable[..., Any]) -> None:
        self._operators, self._intercept = operators, intercept

    def __getattr__(self, name: str) -> Any:
        operator = getattr(self._operators, name)
        return lambda *args: self._intercept(name, operator, args)


# Names in torch.distributed through which hgc's runtime and FSDP2 send; FSDP2's were renamed in 2.13.
_SENDING = (
    *("all_reduce", "broadcast", "isend", "irecv"),
    *("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor"),
)


@contextmanager
def intercepted_collectives(functional: Callable[..., Any], distributed: Callable[..., Any]) -> Iterator[None]:
    """Inside, all that this process sends goes through ``functional(name, call, args)``, for the operators of this file and their
    waits, or ``distributed(name, call, args, kwargs)``, for functions of torch.distributed; both return what the call shall."""
    global _raw
    lazy: Any = torch.distributed._functional_collectives
    raw, wait = _raw, lazy.wait_tensor
    found: dict[str, Any] = {name: getattr(dist, name) for name in _SENDING if hasattr(dist, name)}

    def through(name: str, call: Any) -> Any:
        return lambda *args, **kwargs: distributed(name, call, args, kwargs)

    _raw = _Intercepting(raw, functional)
    lazy.wait_tensor = lambda x: functional("wait_tensor", wait, (x,))
    for name, call in found.items():
        setattr(dist, name, through(name, call))
    try:
        yield
    finally:
        _raw, lazy.wait_tensor = raw, wait
        for name, call in found.items():
            setattr(dist, name, call)


class _NamedComm:
    """A collective of FSDP2 that runs inside ``around()``."""

    def __init__(self, comm: Any, around: Callable[[], Any]) -> None:
        self._comm, self._around = comm, around

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._around():
            return self._comm(*args, **kwargs)


@contextmanager
def named_gathers(module: Any, gathering: Callable[[], Any], scattering: Callable[[], Any]) -> Iterator[None]:
    """Inside, an FSDP2 unit gathers its parameters in ``gathering()`` and scatters their gradients in ``scattering()``, contexts both."""
    groups = [group for group in module._get_fsdp_state()._fsdp_param_groups if group is not None]
    before = [(group, group._all_gather_comm, group._reduce_scatter_comm) for group in groups]
    for group, gather, scatter in before:
        group._all_gather_comm, group._reduce_scatter_comm = _NamedComm(gather, gathering), _NamedComm(scatter, scattering)
    try:
        yield
    finally:
        for group, gather, scatter in before:
            group._all_gather_comm, group._reduce_scatter_comm = gather, scatter


def function_modes() -> list[Any]:
    """The ``TorchFunctionMode`` objects that are active, outermost first; torch takes them off while backward calls Python."""
    return list(torch.overrides._get_current_function_mode_stack())  # type: ignore[no-untyped-call]


def forget_shardings() -> None:
    """Empty DTensor's caches of placements, in Python and of this thread in C++; they keep meshes, and so process groups, alive."""
    if "torch.distributed.tensor" in sys.modules:  # else there is nothing to forget, and the import takes a second
        from torch.distributed.tensor import debug

        debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
        torch._C._clear_DTensor_sharding_propagator_cache()
