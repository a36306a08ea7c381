"""StackTensor: what the modules of a network see in place of an image.

It has the shape of the image, ``[N, C, H, W]``, and holds the stack of its active blocks. PyTorch
hands every function that is called with one to ``__torch_function__``: those that are known run on
the stack, all others on the whole image between a scatter and a gather, and are named. So a network
needs no change, whatever its modules do, and none gets a wrong number in silence.
"""

import copy
import functools
import weakref

import torch
from torch.nn import functional as F

from .._dispatch_state import (
    BACKWARD_HOOK,
    CHECKPOINT,
    is_followed,
    plainly,
    without_memory,
    written_arguments,
)
from . import aliases, casts, left, stages
from .aten import public
from .current import Current
from .handlers import BORDERED, HANDLERS, INSTEAD, METADATA, REFUSED, keeps_rest, takes
from .trees import tree_leaves, tree_map

_INNER_ATTRIBUTES = ("requires_grad", "grad_fn", "is_leaf")


_TABLE = Current()  # of the call that runs


def calling(table):
    """Return a context for a call: activations of other tables are images in it."""
    return _TABLE.set_to(table)


def is_kept(x):
    """Whether x is an activation that a network has kept of an earlier call than the one it is in.

    Outside of calls none is: checkpoints compute parts of a call again after its end.
    """
    table = _TABLE.value
    return table is not None and isinstance(x, StackTensor) and facts(x)[0] is not table


class StackTensor(torch.Tensor):
    """An image of which the active blocks alone are there.

    Attributes
    ----------
    table : Table
        Where the blocks lie.
    block, size : (int, int)
        A block and the image, in pixels of this stage.
    hw : (int, int)
        The dimensions of height and width. The first dimension is that of images or blocks.
    reach : float
        How far, in pixels of the input, values look: each value is of a pixel that covers some of
        the input's, and from any of these what it was made of is no further.
    """

    @staticmethod
    def __new__(cls, value, table, block, size, hw=(2, 3), reach=0.0, plan=None):
        """Make one of a stack, or of a plan that is to be computed when it is read."""
        shape = list(value.shape if plan is None else plan.shape)
        shape[0], shape[hw[0]], shape[hw[1]] = table.batch, *size
        if table.tape is not None and plan is None:
            table.tape.expect(value)
        like = value if plan is None else plan
        self = without_memory(cls, shape, like.dtype, table.device, like.requires_grad)
        self._value, self._plan, self._made_of = value, plan, ()
        self._narrow = None  # of what waits: its value in the dtype to which autocast converts
        self._facts, self._shape = (table, block, size, hw, reach), tuple(shape)
        self._is_lent, self._in_order, self._views = False, table.in_order, None
        self._memory = None
        if table.made is not None:
            table.made.append(weakref.ref(self))
        return self

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """Run a function of PyTorch that was called with one."""
        run = _unfollowed if is_followed() else dispatch
        return run(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default and _TABLE.value is None:
            return _unpacked(args[0])
        refusal = (
            f"{func} was called below PyTorch's functions with an activation of a sparsified "
            "network, for example by torch.jit.script, torch.vmap or torch.func; use the Python "
            "function that was scripted (with PYTORCH_JIT=0 in the environment all stay as they "
            "are), functions of whole batches, or torch.autograd.grad"
        )
        if func is torch.ops.aten.alias.default:  # PyTorch asks no subclass about as_subclass
            refusal = (
                "as_subclass cannot be used on an activation of a sparsified network, which has a "
                "subclass of its own; keep what another would hold beside it, or use as_subclass "
                "on what the network returns"
            )
        like = first_stack(args, kwargs)
        if like is not None:
            facts(like)[0].refusal = refusal
        raise NotImplementedError(refusal)

    def __repr__(self, **_):
        table, block, _, hw, _ = facts(self)
        return f"StackTensor(shape={shape(self)}, block={block}, blocks={table.rows}, hw={hw})"

    __str__ = __repr__

    def __format__(self, spec):
        return format(repr(self), spec)

    def __reduce_ex__(self, protocol):
        """Pickle one that a network has kept, as its image."""
        return _image_of_kept(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo):
        """Return a copy of the image of one that a network has kept.

        As in PyTorch it has no gradient, and none may be recorded.
        """
        image = _image_of_kept(self)
        memo[id(self)] = copy.deepcopy(image if torch.is_grad_enabled() else image.detach(), memo)
        return memo[id(self)]


def _unpacked(x):
    """Return what autograd makes of one that hooks saved, as a checkpoint in another one does.

    Autograd then says whether it requires a gradient, see :func:`value_of`.
    """
    table, block, size, hw, reach = facts(x)
    out = StackTensor(value_of(x).detach(), table, block, size, hw, reach)
    aliases.own(out)["_border"], aliases.own(out)["_is_unpacked"] = border_of(x), True
    return out


def _image_of_kept(x):
    if _TABLE.value is not None:
        raise NotImplementedError(
            "an activation of a sparsified network can be neither pickled nor copied by the module "
            "copy while the network runs; use clone()"
        )
    return dense(x)


def facts(x):
    """Return (table, block, size, hw, reach) of a StackTensor, past PyTorch's hooks."""
    return object.__getattribute__(x, "__dict__")["_facts"]


def value_of(x):
    """Return the stack that a StackTensor holds; computes what was put off."""
    own = object.__getattribute__(x, "__dict__")
    if own["_value"] is None:
        _compute(x, own)
    elif torch.is_grad_enabled():
        _check_gradient(x)
    if own["_memory"] is not None:
        own["_memory"].check()
    return own["_value"]


def narrow_dtype(x):
    """Return the dtype of autocast if what waits can be computed in it at once, or None."""
    plan, to = plan_of(x), casts.dtype_for(x)
    return None if plan is None or to is None or plan.narrowed(to) is None else to


def value_as(x, to):
    """Return the stack that a StackTensor holds, as autocast converts it to a dtype, or to none.

    What waits is computed in that dtype at once, if it can be; it goes on waiting for other uses.
    """
    own, plan = object.__getattribute__(x, "__dict__"), plan_of(x)
    if plan is None or to is None:
        return casts.cast(value_of(x), to)
    with casts.off(facts(x)[0].device):
        if own["_narrow"] is None or own["_narrow"].dtype != to:
            narrow = plan.narrowed(to)
            own["_narrow"] = None if narrow is None else narrow.run()
        if own["_narrow"] is not None:
            return own["_narrow"]
        ahead = [ref() for ref, _ in own["_made_of"]]
        alone = all(one is None or one is x for one in ahead)
        both = plan.run_both(to) if alone else None
        if both is not None:
            _done(x, own, plan, both[0])
            return both[1]
        return casts.cast(value_of(x), to)


def _compute(x, own):
    """Run what was put off, and what was found to follow it, in the mode that it was called in."""
    records = own["_plan"].records
    if records is None:
        with casts.off(facts(x)[0].device):  # plans convert what they read themselves
            _run(x, own)
    elif records == torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        _run(x, own)
    else:
        with torch.inference_mode(False), torch.set_grad_enabled(records):
            _run(x, own)


def _run(x, own):
    plan, value = own["_plan"], None
    for ref, steps in own["_made_of"]:
        ahead = ref()
        if ahead is not None and ahead is not x:  # what this one was made of is wanted too
            left = plan.apart(ahead, steps)
            if left is not None:
                value = left.run()
                break
            value = value_of(ahead)
            for func, *more in steps:
                value = facts(x)[0].compute(func, value, *more)
            break
    _done(x, own, plan, plan.run() if value is None else value)


def _done(x, own, plan, value):
    """Note the value of what has waited."""
    aliases.note_rest(x, facts(x)[0], plan.rest)
    own["_value"] = plan.done = value
    facts(x)[0].plans.pop(id(x), None)
    own["_plan"], own["_narrow"], own["_made_of"] = None, None, ()


def _check_gradient(x):
    own = object.__getattribute__(x, "__dict__")
    if "_is_unpacked" in own and plainly(torch.Tensor.requires_grad.__get__, x):
        own["_value"].requires_grad_()
    made_by = plainly(torch.Tensor.grad_fn.__get__, x)
    if made_by is not None:
        name = type(made_by).__name__
        raise NotImplementedError(_NO_GRADIENT.get(name, _NO_GRADIENT[None]).format(name))


_NO_GRADIENT = {
    BACKWARD_HOOK: "register_full_backward_hook and register_full_backward_pre_hook cannot be used "
    "on a module inside a sparsified network, whose gradients are no images; register the hook on "
    "what sparsify returns, or use register_hook of activations or parameters",
    CHECKPOINT: "a reentrant torch.utils.checkpoint cannot be used in a sparsified network; pass "
    "use_reentrant=False to checkpoint",
    None: "{} is an autograd function of its own, whose gradient cannot pass through a sparsified "
    "network; use PyTorch's functions in its place",
}


def plan_of(x):
    """Return the convolution that was put off, or None."""
    return object.__getattribute__(x, "__dict__")["_plan"] if isinstance(x, StackTensor) else None


def postpone(table, plan, block, size, reach, parent=None, step=None, hw=(2, 3)):
    """Return a StackTensor of a convolution, or its like, that waits for what follows it.

    ``step`` is a function, and its arguments after the first, that makes its value of that of its
    parent, which waits too.
    """
    out = StackTensor(None, table, block, size, hw, reach, plan)
    own = object.__getattribute__(out, "__dict__")
    if parent is not None:
        before = object.__getattribute__(parent, "__dict__")["_made_of"]
        before = [(ref, (*steps, step)) for ref, steps in before]
        own["_made_of"] = [(weakref.ref(parent), (step,)), *before]
    table.plans.pop(id(out), None)  # of one that is gone: what waits is computed in its order
    table.plans[id(out)] = weakref.ref(out)
    return out


def replace_plan(x, plan, step):
    """Add a step in place to a convolution that waits; its function returns a new tensor."""
    own = object.__getattribute__(x, "__dict__")
    own["_plan"], own["_narrow"] = plan, None
    own["_made_of"] = [(ref, (*steps, step)) for ref, steps in own["_made_of"]]


def flush(table):
    """Compute all that waits: something is about to be written that it may read."""
    for ref in list(table.plans.values()):
        waiting = ref()
        if waiting is not None:
            value_of(waiting)


def flush_readers(table, x):
    """Compute what waits and reads ``x``, which waits too and is about to get a step in place."""
    for ref in list(table.plans.values()):
        waiting = ref()
        if waiting is None or waiting is x:
            continue
        own = object.__getattribute__(waiting, "__dict__")
        made_of_it = any(ref() is x for ref, _ in own["_made_of"])
        if own["_plan"] is not None and (made_of_it or own["_plan"].reads(x)):
            value_of(waiting)


def wrap(value, like, *, block=None, size=None, hw=None, reach=None):
    """Return a StackTensor of a stack, with the facts of another where none are given."""
    table, b, s, d, r = facts(like)
    if reach is None:
        reach = r if block is None else r + table.coarser(b, block)
    return StackTensor(value, table, block or b, size or s, hw or d, reach)


def dense(x):
    """Return the whole image of a StackTensor, 0 outside active blocks; others as they are."""
    if not isinstance(x, StackTensor):
        return x
    table, block, size, hw, _ = facts(x)
    image = table.compute(table.scatter, value_of(x), block, size, hw)
    border = border_of(x)
    if border is None:
        return image
    top, bottom, left, right, mode, value = border
    around = (left, right, top, bottom)
    if mode == "zeros":
        return table.compute(F.pad, image, around, value=value)
    return table.compute(F.pad, image, around, mode=mode)


def map_dense(tree, images=None):
    """Replace the StackTensors in arguments by images that can be viewed as they like.

    The list ``images`` takes each with its image, and whether that has the usual order.
    """

    def replaced(x):
        if not isinstance(x, StackTensor):
            return x
        table = facts(x)[0]
        image = table.compute(torch.Tensor.contiguous, dense(x))
        if image.is_inference() and table.tape is None:
            image = aliases.versioned(image)
        if images is not None:
            images.append((x, image, facts(x)[3] == (2, 3)))
        return image

    return tree_map(replaced, tree)


def first_stack(*trees):
    """Return the first StackTensor in arguments, lists of them included."""
    for item in trees:
        if isinstance(item, StackTensor):
            return item
        if isinstance(item, (list, tuple)):
            found = first_stack(*item)
        elif isinstance(item, dict):
            found = first_stack(*item.values())
        else:
            continue
        if found is not None:
            return found
    return None


def gathered(image, like, steps=None):
    """Return the StackTensor of an image that has the place of one of the call's stages, or it.

    ``steps`` is what :func:`stages.steps_of` returned for the function that made it.
    """
    table, _, _, hw, _ = facts(like)
    if not isinstance(image, torch.Tensor) or isinstance(image, StackTensor):
        return image
    if image.dim() <= max(hw) or image.shape[0] != table.batch:
        return image
    if image.layout != torch.strided or image.is_quantized:
        return image
    block = stages.block_of(image, facts(like), steps)
    if block is None:
        return image
    aliases.note_order(image, table)
    if not torch.is_grad_enabled():
        value = table.compute(table.gather, image, block, hw)
    else:
        value = table.cut(image.clone() if table.whole and table.full else image, block, hw)
    got = (image.shape[hw[0]], image.shape[hw[1]])
    return StackTensor(value, table, block, got, hw, float("inf"))


def dispatch(func, args, kwargs):
    """Run a function that was called with a StackTensor."""
    func, args, kwargs = public(func, args, kwargs)
    handler = None if kwargs and kwargs.get("out") is not None else HANDLERS.get(func)
    name = getattr(func, "__name__", None) or str(func)
    if handler is None and name == "__get__":
        return _attribute(func, args)
    if handler is not None and not takes(handler, len(args), tuple(kwargs)):
        handler = None
    if handler is not None:
        like = args[0] if args and type(args[0]) is StackTensor else first_stack(args, kwargs)
        table = None if like is None else facts(like)[0]
        if is_kept(like):
            return _on_kept(func, name, args, kwargs)
        if table is not None and table.borders and handler not in BORDERED:
            handler = None if _has_border((args, kwargs)) else handler
    if handler is not None:
        trace = None if table is None else table.trace
        if trace is None:
            result = handler(func, *args, **kwargs)
        else:
            result = trace.around(name, handler, func, args, kwargs)
        if result is not NotImplemented:
            return _signed(result, name, args, kwargs)
    if name in METADATA:
        return plainly(func, *args, **kwargs)
    if name in REFUSED or kwargs.get("out") is not None:
        with_out = " with out=" if kwargs.get("out") is not None else ""
        instead = f"; use {INSTEAD[name]}" if name in INSTEAD else ""
        raise NotImplementedError(
            f"{name} cannot be used{with_out} on an activation of a sparsified network{instead}"
        )
    return _signed(on_image(func, name, args, kwargs), name, args, kwargs)


_unfollowed = torch.compiler.disable(dispatch)  # in a function that is compiled in the network


def _signed(result, name, args, kwargs):
    """Return what a function made, and note its name there; activations pass the one before on.

    Only where something is wanted outside active blocks, for the errors that say what was made.
    """
    if type(result) is StackTensor and facts(result)[0].left is not None:
        by, x = name, args[0] if args else None
        if type(x) is StackTensor and keeps_rest(name, (*args[1:], *kwargs.values())):
            by = aliases.own(x).get("_made_by", name)
        aliases.own(result)["_made_by"] = by
    return result


def _has_border(given):
    leaves = tree_leaves(given)
    return any(isinstance(leaf, StackTensor) and border_of(leaf) for leaf in leaves)


def _attribute(func, args):
    """Read an attribute: sizes of the image, and the gradient's of the stack."""
    name, x = func.__self__.__name__, args[0]
    if name in _INNER_ATTRIBUTES:
        plan = plan_of(x)
        if plan is not None and not plan.requires_grad:
            return {"requires_grad": False, "grad_fn": None, "is_leaf": True}[name]
        return getattr(value_of(x), name)
    if name == "data":
        return HANDLERS[torch.Tensor.detach](torch.Tensor.detach, x)
    if name in ("T", "mT", "H", "mH", "real", "imag"):
        return on_image(func, name, args, {})
    return plainly(func, *args)


def on_image(func, name, args, kwargs):
    """Run a function on whole images, and take its result back to the stack where it fits."""
    like = first_stack(args, kwargs)
    if is_kept(like):
        return _on_kept(func, name, args, kwargs)
    table = facts(like)[0]
    targets = written(func, name, args, kwargs)
    flush(table)
    table.reduced = table.reduced or f"{name} of a whole image"
    if targets and table.tape is not None:
        table.tape.stop(f"{name}, which wrote to an image")
    stacks = [target for target in targets if isinstance(target, StackTensor)]
    if stacks:
        return _write(stacks, func, name, args, kwargs)
    if first_stack(targets) is not None:
        raise NotImplementedError(
            f"{name} cannot write to a list with an activation of a sparsified network"
        )
    images = []
    result = _traced(table, name, func, map_dense(args, images), map_dense(kwargs, images))
    if _writes(name, kwargs):
        left.note(table, name)
        return result
    steps = stages.steps_of(name, args, kwargs, like)
    taken = tree_map(lambda image: gathered(image, like, steps), result)
    if not all(isinstance(leaf, StackTensor) for leaf in tree_leaves(taken)):
        left.note(table, name)
    if not table.static:
        aliases.note_parts(name, (func, args, kwargs), images, result, taken)
    return taken


def _write(targets, func, name, args, kwargs):
    """Run a function that writes to some StackTensors on their images."""
    table = facts(targets[0])[0]
    given = tree_map(lambda x: None if any(x is t for t in targets) else x, (args, kwargs))
    for target in targets:
        aliases.about_to_write(target, table, given)
    images = [dense(target).clone() for target in targets]
    for_target = {id(target): image for target, image in zip(targets, images, strict=True)}
    args, kwargs = map_dense(tree_map(lambda x: for_target.get(id(x), x), (args, kwargs)))
    result, shown = _traced(table, name, func, args, kwargs), {}
    for target, image in zip(targets, images, strict=True):
        _, block, _, hw, _ = facts(target)
        if border_of(target) is not None:
            aliases.spend(target, name)
            shown[id(image)] = gathered(image, target)
        else:
            value_of(target).copy_(table.gather(image, block, hw))
            shown[id(image)] = target
    return tree_map(lambda x: shown[id(x)] if id(x) in shown else gathered(x, targets[0]), result)


def _on_kept(func, name, args, kwargs):
    """Run a function of activations that were kept from an earlier call: of their images."""
    if name in REFUSED:
        raise NotImplementedError(
            f"{name} cannot be used on an activation of an earlier call of a sparsified network"
        )
    if any(map(is_kept, written(func, name, args, kwargs))):
        raise NotImplementedError(
            f"{name} cannot write to an activation of an earlier call of a sparsified network; "
            "write to a clone() of it"
        )
    args, kwargs = tree_map(lambda x: dense(x) if is_kept(x) else x, (args, kwargs))
    if first_stack(args, kwargs) is None:
        return _traced(_TABLE.value, name, func, args, kwargs)
    return func(*args, **kwargs)


def _traced(table, name, func, args, kwargs):
    """Run a function on whole images, as a row of a trace, or a step of a tape, if there is one."""
    if table.trace is not None:
        return table.trace.on_image(name, func, args, kwargs)
    if table.tape is not None:
        table.tape.begin()
    result = func(*args, **kwargs)
    if table.tape is not None:
        table.tape.note_image(func, args, kwargs, result)
    return result


def written(func, name, args, kwargs):
    """Return the arguments that a function writes to."""
    found = written_arguments(func)
    if found is not None:
        return [args[i] if i < len(args) else kwargs.get(key) for key, i in found.items()]
    if not _writes(name, kwargs):
        return []
    return [args[0] if args else kwargs.get("input", kwargs.get("tensor"))]


def _writes(name, kwargs):
    """Whether a function changes its first argument."""
    name = name.split(".")[0]  # of an operator, an overload follows
    if name == "__setitem__" or kwargs.get("inplace"):
        return True
    if name.startswith("__"):
        return name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    return name.endswith("_")


def dims(x):
    """Return the number of dimensions of a tensor, past PyTorch's hooks."""
    return len(shape(x)) if isinstance(x, StackTensor) else x.dim()


def shape(x):
    """Return the shape of a StackTensor, past PyTorch's hooks."""
    return object.__getattribute__(x, "__dict__")["_shape"]


def picture(x, to=None):
    """Return the stack of a StackTensor for functions that look at neighbours.

    Where whole images stand for blocks, they are 0 outside active blocks. Blocks are converted to a
    dtype as :func:`value_as` does.
    """
    table, block, _, hw, _ = facts(x)
    return table.compute(table.zero, value_of(x), block, hw) if table.whole else value_as(x, to)


def border_of(x):
    """Return the padding that was put off, (top, bottom, left, right, mode, value), or None."""
    return object.__getattribute__(x, "__dict__").get("_border")


def with_border(x, border):
    """Return a StackTensor whose image is padded when it is next read."""
    table, block, size, hw, reach = facts(x)
    top, bottom, left, right = border[:4]
    value = value_of(x)
    padded = size[0] + top + bottom, size[1] + left + right
    out = StackTensor(value, table, block, padded, hw, reach)
    own = aliases.own(out)
    own["_border"], own["_facts"] = border, (table, block, size, hw, reach)
    table.borders = True
    return aliases.lend(out, table)


def viewed(func, x, *args, hw=None, **kwargs):
    """Return what a function that views makes of a StackTensor, with pixels at ``hw``."""
    value = aliases.viewed(x, facts(x)[0], func, value_of(x), *args, **kwargs)
    if isinstance(value, torch.Tensor):
        view = functools.partial(_part_of, func, args, kwargs)
        return aliases.inherit(wrap(value, x, hw=hw), x, view)
    views = (functools.partial(_part_of, func, args, kwargs, at=i) for i in range(len(value)))
    parts = (wrap(part, x, hw=hw) for part in value)
    return type(value)(
        aliases.inherit(*one) for one in zip(parts, [x] * len(value), views, strict=True)
    )


def _part_of(func, args, kwargs, x, at=None):
    result = func(x, *args, **kwargs)
    return result if at is None else result[at]
