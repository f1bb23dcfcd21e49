"""How operators read in Python: a printer for each one that has a better form than ``torch.ops.aten.name.overload(...)``.

A form is listed only if calling it reaches the very same operator with the very same arguments.
"""

from __future__ import annotations

import keyword
import math
import re
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import fx

from hgc.backends.torchrun.expressions import Binding, Expression, binary, call, number
from hgc.backends.torchrun.indexing import INDEXING
from hgc.backends.torchrun.names import words
from hgc.backends.torchrun.operation import Operation, parameters
from hgc.errors import ArtifactError
from hgc.ir import ops
from hgc.ir.ops.attention import attention
from hgc.ir.rules.core import named_arguments
from hgc.ir.value import Size, info, value

Printer: TypeAlias = Callable[[Operation], Expression | None]
"""``None`` if the call has arguments that the better form cannot say."""

_BINARY: dict[str, tuple[str, Binding]] = {
    "add": ("+", Binding.SUM),
    "sub": ("-", Binding.SUM),
    "mul": ("*", Binding.PRODUCT),
    "div": ("/", Binding.PRODUCT),
    "floor_divide": ("//", Binding.PRODUCT),
    "remainder": ("%", Binding.PRODUCT),
    "matmul": ("@", Binding.PRODUCT),
    "bitwise_and": ("&", Binding.AND),
    "bitwise_or": ("|", Binding.OR),
    "bitwise_xor": ("^", Binding.XOR),
    "__and__": ("&", Binding.AND),
    "__or__": ("|", Binding.OR),
    "__xor__": ("^", Binding.XOR),
    "eq": ("==", Binding.COMPARE),
    "ne": ("!=", Binding.COMPARE),
    "lt": ("<", Binding.COMPARE),
    "le": ("<=", Binding.COMPARE),
    "gt": (">", Binding.COMPARE),
    "ge": (">=", Binding.COMPARE),
}

_METHODS = words(
    """
    abs acos all amax amin any argmax argmin argsort asin atan bmm ceil chunk clamp clamp_max clamp_min clone contiguous cos cosh
    count_nonzero cummax cumprod cumsum detach diagonal diff erf erfc exp expm1 expand_as flatten flip floor frac gather index_add
    index_copy index_fill index_select isfinite isinf isnan lerp log log10 log1p log2 logical_and logical_not logical_or logical_xor
    logsumexp masked_fill masked_scatter max mean min mm movedim narrow new_empty new_full new_ones new_zeros nonzero pow prod
    reciprocal repeat_interleave roll round rsqrt scatter scatter_add scatter_reduce sigmoid sign sin sinh sort split_with_sizes
    sqrt square squeeze std sum swapaxes t tan tanh tile topk transpose tril triu trunc type_as unbind unflatten unfold unsqueeze
    var view_as xlogy
    """
)

_VARIADIC = ("reshape", "permute", "expand", "repeat", "view")
"""Methods that take their only list as separate arguments."""

_CREATION = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "scalar_tensor", "zeros")

_FUNCTIONS = words(
    """
    addcmul bincount block_diag bucketize cat complex cumulative_trapezoid cross dstack empty_like full_like hstack isin maximum
    minimum ones_like outer polar rand_like randn_like searchsorted stack vstack where zeros_like histc baddbmm addmm tensordot
    cdist conv_tbc
    """
)

_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}

_FUNCTIONAL = {
    "linear": "input weight bias",
    "bilinear": "input1 input2 weight bias",
    "layer_norm": "input normalized_shape weight bias eps=",
    "rms_norm": "input normalized_shape weight eps=",
    "group_norm": "input num_groups weight bias eps=",
    "conv1d": "input weight bias stride= padding= dilation= groups=",
    "conv2d": "input weight bias stride= padding= dilation= groups=",
    "conv3d": "input weight bias stride= padding= dilation= groups=",
    "conv_transpose1d": "input weight bias stride= padding= output_padding= groups= dilation=",
    "conv_transpose2d": "input weight bias stride= padding= output_padding= groups= dilation=",
    "max_pool1d": "self kernel_size stride= padding= dilation= ceil_mode=",
    "max_pool2d": "self kernel_size stride= padding= dilation= ceil_mode=",
    "avg_pool1d": "self kernel_size stride= padding= ceil_mode= count_include_pad=",
    "avg_pool2d": "self kernel_size stride= padding= ceil_mode= count_include_pad= divisor_override=",
    "adaptive_avg_pool1d": "self output_size",
    "adaptive_avg_pool2d": "self output_size",
    "gelu": "self approximate=",
    "relu": "self",
    "relu6": "self",
    "silu": "self",
    "mish": "self",
    "elu": "self alpha=",
    "selu": "self",
    "hardswish": "self",
    "hardsigmoid": "self",
    "leaky_relu": "self negative_slope=",
    "softplus": "self beta= threshold=",
    "glu": "self dim=",
    "softmax": "self dim= dtype=",
    "log_softmax": "self dim= dtype=",
    "dropout": "input p train>training=",
    "embedding": "indices weight padding_idx=",
    "one_hot": "self num_classes=",
    "pad": "self pad mode= value=",
    "cosine_similarity": "x1 x2 dim= eps=",
    "cross_entropy_loss>cross_entropy": "self target weight= reduction= ignore_index= label_smoothing=",
    "nll_loss_nd>nll_loss": "self target weight= reduction= ignore_index=",
    "mse_loss": "self target reduction=",
    "l1_loss": "self target reduction=",
    "huber_loss": "self target reduction= delta=",
    "smooth_l1_loss": "self target reduction= beta=",
    "binary_cross_entropy_with_logits": "self target weight= pos_weight= reduction=",
    "binary_cross_entropy": "self target weight= reduction=",
    "kl_div": "self target reduction= log_target=",
    "scaled_dot_product_attention": "query key value attn_mask= dropout_p= is_causal= scale= enable_gqa=",
}
"""ATen name (``>`` name in torch.nn.functional) -> its arguments as that function takes them; ``=`` marks keywords, ``>`` renames."""

_IGNORED = frozenset({"cudnn_enabled", "cudnn_enable", "scale_grad_by_freq", "sparse"})


def print_operation(operation: Operation) -> Expression:
    """The most readable source with exactly the meaning of the call."""
    printer = _TABLE.get(operation.target)
    printed = printer(operation) if printer is not None else None
    printed = printed if printed is not None else _as_it_is(operation)
    return _again(printed) if info(operation.node).recompute else printed


def _again(printed: Expression) -> Expression:
    """``f(x)`` that is run again in backward."""
    function, _, arguments = printed.text.partition("(")
    return Expression(f"rt.recompute({function}, {arguments}")


def is_pure(node: fx.Node) -> bool:
    """False for what draws random numbers or changes a tensor: such calls keep their place."""
    target: Any = node.target
    schema = getattr(target, "_schema", None)
    if schema is not None:
        return not schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags
    if target is attention:
        return not named_arguments(node)["dropout"]
    return target not in (ops.dropout, ops.batch_norm)


def _as_it_is(operation: Operation) -> Expression:
    target = operation.target
    if isinstance(target, torch._ops.OpOverload):
        name = str(target)
        if not all(part.isascii() and part.isidentifier() and not keyword.iskeyword(part) for part in name.split(".")):
            raise ArtifactError(f"operator {name!r} has a name that is no Python source; register it under an identifier")
        return call(f"torch.ops.{name}", operation.rest(0, lists_as=list))
    name = next((n for n in ops.__all__ if getattr(ops, n) is target), "")
    if name:
        return call(f"ops.{name}", operation.rest(0))
    raise ArtifactError(f"{target!r} is a Python function that an emitted program cannot import; register it with torch.library.custom_op")


def _binary_operator(symbol: str, binding: Binding) -> Printer:
    def printer(o: Operation) -> Expression | None:
        left, right = (p.name for p in parameters(o.target)[:2])
        if any(not o.is_default(p.name) for p in parameters(o.target)[2:]):
            return None  # add with alpha, div with rounding
        return binary(o.source(o[left]), symbol, o.source(o[right]), binding)

    return printer


def _reversed_sub(o: Operation) -> Expression | None:
    return binary(o.source(o["other"]), "-", o.source(o["self"]), Binding.SUM) if o.is_default("alpha") else None


def _unary_operator(symbol: str) -> Printer:
    return lambda o: Expression(f"{symbol}{o.source(o['self']).within(Binding.UNARY)}", Binding.UNARY)


def _einsum(o: Operation) -> Expression | None:
    if len(o["tensors"]) > 2 or not o.is_default("path"):
        return None  # torch.einsum would choose a path of its own
    return call("torch.einsum", [o.text("equation"), *(o.source(t).text for t in o["tensors"])])


def _method(name: str) -> Printer:
    def printer(o: Operation) -> Expression | None:
        first = parameters(o.target)[0].name
        if not isinstance(o[first], fx.Node):
            return None
        return call(f"{o.atom(first)}.{name}", o.rest(1, ignore=frozenset({"device", "pin_memory"})))

    return printer


def _scatter_slice(o: Operation) -> Expression:
    """``x`` with ``src`` in place of ``x[start:end]``."""
    bounds = [f"start={o.text('start')}"] if o["start"] else []
    bounds += [] if o["end"] is None or (isinstance(o["end"], int) and o["end"] >= sys.maxsize) else [f"end={o.text('end')}"]
    bounds += [f"step={o.text('step')}"] if o["step"] != 1 else []
    return call(f"{o.atom('self')}.slice_scatter", [o.text("src"), f"dim={o.text('dim')}", *bounds])


def _variadic(name: str) -> Printer:
    def printer(o: Operation) -> Expression:
        first, sizes, *_ = (p.name for p in parameters(o.target))
        items = o[sizes]
        if not items:
            return call(f"{o.atom(first)}.{name}", ["()"])
        return call(f"{o.atom(first)}.{name}", (o.source(item).text for item in items))

    return printer


def _function(name: str) -> Printer:
    return lambda o: call(name, o.rest(0, ignore=frozenset({"device", "pin_memory", "layout"})))


def _creation(name: str) -> Printer:
    def printer(o: Operation) -> Expression:
        given = o.rest(0, ignore=frozenset({"device", "pin_memory", "layout"}))
        return call(name, [*given, f"device={o.device}"])

    return printer


def _functional(function: str, specification: str) -> Printer:
    wanted = [re.fullmatch(r"(\w+)(?:>(\w+))?(=?)", token) for token in specification.split()]
    tokens = [(m[1], m[2] or m[1], bool(m[3])) for m in wanted if m is not None]
    covered = {schema for schema, _, _ in tokens} | _IGNORED

    def printer(o: Operation) -> Expression | None:
        if any(p.name not in covered or (p.name in _IGNORED and o[p.name] is True and "cudnn" not in p.name) for p in parameters(o.target)):
            return None
        arguments: list[str] = []
        skipped = False
        for schema, name, by_keyword in tokens:
            if schema not in o.arguments or o.is_default(schema):
                skipped = True
                continue
            text = quoted_reduction(o[schema]) if schema == "reduction" else _functional_argument(o, schema)
            arguments.append(f"{name}={text}" if by_keyword or skipped else text)
        return call(f"F.{function}", arguments)

    return printer


def _functional_argument(o: Operation, name: str) -> str:
    found = o[name]
    if isinstance(found, list | tuple):
        same = len(set(map(str, found))) == 1 and name in ("stride", "padding", "dilation", "kernel_size", "output_padding", "output_size")
        return o.source(found[0] if same else tuple(found)).text
    return o.text(name)


def quoted_reduction(code: int) -> str:
    return f'"{_REDUCTIONS[code]}"'


def _cast(o: Operation) -> Expression | None:
    if not o.is_default("non_blocking") or not o.is_default("copy") or not o.is_default("memory_format"):
        return None
    short = {torch.float32: "float", torch.int64: "long", torch.bool: "bool"}.get(o["dtype"])
    return Expression(f"{o.atom('self')}.{short}()" if short else f"{o.atom('self')}.to({o['dtype']})")


def _attention(o: Operation) -> Expression:
    """torch's own function where it says everything."""
    plain = o["sinks"] is None and not o["softcap"] and not o["window"] and not (o["dropout"] and o["random_axes"])
    plain = plain and o["exchange_axis"] is None and o["ring_axis"] is None and o["where"] is None
    q, k = (value(o[name]).shape for name in ("q", "k"))
    texts = {name: "" if o.is_default(name) else o.text(name) for name in list(o.arguments)[3:]}
    inputs = [o.text(name) for name in "qkv"]
    if not plain or (o["causal"] and o["bias"] is not None):
        texts["scale"] = "" if o["scale"] is None else _scale(o["scale"], q[3], int(q[3]) ** -0.5 if q[3].is_Integer else None)
        return call("ops.attention", [*inputs, *(f"{name}={text}" for name, text in texts.items() if text)])
    optional = {
        "attn_mask": texts["bias"],
        "dropout_p": texts["dropout"],
        "is_causal": texts["causal"],
        "scale": "" if o["scale"] is None else _scale(o["scale"], q[3], 1.0 / math.sqrt(int(q[3])) if q[3].is_Integer else None),
        "enable_gqa": "True" if q[1] != k[1] else "",
    }
    return call("F.scaled_dot_product_attention", [*inputs, *(f"{name}={text}" for name, text in optional.items() if text)])


def _scale(scale: float, size: Size, default: float | None) -> str:
    """Nothing for the function's own scale, ``64**-0.5`` where that is the very same number, which models like to write."""
    if scale == default:
        return ""
    power = size.is_Integer and scale == int(size) ** -0.5
    return f"{int(size)}**-0.5" if power else number(scale).text


def _cross_entropy(o: Operation) -> Expression | None:
    if o["vocab_axis"] is not None or o["batch_axes"] or o["vocab_size"] is not None:
        return None
    return call("F.cross_entropy", [o.text("logits"), o.text("target"), *o.rest(2)])


def _dropout(o: Operation) -> Expression | None:
    return None if o["random_axes"] or o["where"] is not None else call("F.dropout", [o.text("x"), o.text("p")])


def _batch_norm(o: Operation) -> Expression | None:
    if o["batch_axes"] or o["mean"] is None:
        return None
    usual = {"training": False, "momentum": 0.1, "eps": 1e-5}
    given = [f"{name}={o.text(name)}" for name, default in usual.items() if o[name] != default]
    affine = [o.text("weight"), o.text("bias")] if o["weight"] is not None or o["bias"] is not None else []
    return call("F.batch_norm", [o.text("x"), o.text("mean"), o.text("var"), *affine, *given])


def _mean(o: Operation) -> Expression | None:
    return None if o["batch_axes"] else call(f"{o.atom('x')}.mean", o.rest(1))


def _table() -> dict[Any, Printer]:
    table: dict[Any, Printer] = {}

    def add(names: str, printer: Printer, *kinds: str) -> None:
        packet = getattr(torch.ops.aten, names, None)
        for overload in packet.overloads() if packet is not None else ():
            if not kinds or overload in kinds:
                table[getattr(packet, overload)] = printer

    for name in sorted(_METHODS):
        add(name, _method(name))
    for name in _VARIADIC:
        add(name, _variadic(name), "default")
    for name in sorted(_FUNCTIONS):
        add(name, _function(f"torch.{name}"))
    for name in _CREATION:
        add(name, _creation(f"torch.{name}"))
    for name, specification in _FUNCTIONAL.items():
        packet, _, renamed = name.partition(">")
        add(packet, _functional(renamed or packet, specification))
    for name, (symbol, binding) in _BINARY.items():
        add(name, _binary_operator(symbol, binding), "Tensor", "Scalar", "default", "Tensor_Scalar")
    for name, symbol in (("neg", "-"), ("bitwise_not", "~")):
        add(name, _unary_operator(symbol), "default")
    add("rsub", _reversed_sub)
    add("to", _cast, "dtype")
    add("einsum", _einsum)
    add("linalg_vector_norm", _function("torch.linalg.vector_norm"), "default")
    add("broadcast_tensors", lambda o: call("torch.broadcast_tensors", (o.source(t).text for t in o["tensors"])))
    add("slice_scatter", _scatter_slice, "default")
    add("select_scatter", _method("select_scatter"), "default")
    add("numpy_T", lambda o: Expression(f"{o.atom('self')}.T"), "default")
    add("pow", _function("torch.pow"), "Scalar")
    add("split", _method("split"), "Tensor", "sizes")
    add("split_with_sizes", _method("split"), "default")
    for target in [t for t in table if getattr(t, "_schema", None) is not None and t._schema.is_mutable]:
        del table[target]
    table |= INDEXING
    table |= {ops.cross_entropy: _cross_entropy, ops.dropout: _dropout, ops.batch_norm: _batch_norm, ops.mean: _mean, attention: _attention}
    return table


_TABLE = _table()
