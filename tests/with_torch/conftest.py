"""Fixtures that put the core's NumPy bodies in the place of a network's CUDA kernels."""

import contextlib
import math

import numpy as np
import pytest

import sbnet_cupy as sb

ACTIVATIONS = (None, "relu", "silu", "gelu")
OTHERS = {4: "hardswish", 5: "relu6", 6: "hardsigmoid", 7: "sigmoid"}
LEAST_SLOPE = 0x00800000  # of activation.cuh


def activated(y, code):
    """Return what the activation of a number makes of a tensor."""
    functional = __import__("torch").nn.functional
    if code >= LEAST_SLOPE:
        return functional.leaky_relu(y, float(np.int32(code).view(np.float32)))
    name = ACTIVATIONS[code] if code < 4 else OTHERS[code]
    return y if name is None else getattr(functional, name)(y)


def last(*tensors):
    """Return stacks ``[M, C, h, w]`` as kernels see their memory; some may be None."""
    return [t if t is None else t.permute(0, 2, 3, 1) for t in tensors]


def start(launch, *tensors, order=None, out=None):
    """Call what stands for a kernel with tensors in place of their addresses.

    Where it is said what the kernel writes, it must write nothing else: the order of a CUDA graph's
    kernels is made of it.
    """
    if out is None:
        launch(*tensors)
        return
    outs = [t for t in (out if isinstance(out, tuple) else (out,)) if t is not None]
    written = {t.data_ptr() for t in outs}
    assert written <= {t.data_ptr() for t in tensors if hasattr(t, "shape")}
    read = [t for t in tensors if hasattr(t, "shape") and t.data_ptr() not in written]
    before = [t.clone() for t in read]
    launch(*tensors)
    for now, then in zip(read, before, strict=True):
        same = now.equal(then) or bool(((now == then) | (now != now)).all())  # NaN is left
        assert same, "a kernel wrote what it does not say"


@pytest.fixture
def asked(torch, st, monkeypatch):
    """Serve CPU tensors by the core's operations; return the names of what was asked for."""
    from sbnet_cupy.torch.network import (
        cuda,
        cuda_affine,
        cuda_ends,
        cuda_norm,
        cuda_pool,
        cuda_resize,
        cuda_sum,
        cuda_weights,
        onednn,
        shortcuts,
    )

    names = []

    def stage(counts, indices, grid, block, size):
        return sb.BlockTable(*(t.numpy() for t in (counts, indices, grid)), block, size)

    def prepare_conv(
        dtype, rows, images, grid, block, block_out, image, image_out, channels, channels_out,
        kernel, strides, dilation, pads, activation, depthwise, group, parts, unfolded, settled,
        clear_rows, of_weights,
    ):  # fmt: skip
        scales_last, activation = bool(activation & 1 << 30), activation & ~(1 << 30)

        def padded(weight, bias, in_groups):
            """Return weights with zeros for the channels that pad pixels, as they are packed."""
            if in_groups or of_weights == (channels, channels_out):
                return weight, bias
            names[-1] += " padded"
            more = [n - own for n, own in zip((channels, channels_out), of_weights, strict=True)]
            pad = torch.nn.functional.pad
            weight = pad(weight, (0, 0, 0, 0, 0, more[0], 0, more[1]))
            return weight, bias if bias is None else pad(bias, (0, more[1]))

        def run(x, weight, bias, residual, counts, indices, places, out, scaled=None):
            names.append("depthwise" if depthwise else "settled" if settled else "conv")
            weight, bias = padded(weight, bias, group or depthwise)
            for stack, channels_of in zip((x, residual, out), parts, strict=True):
                assert stack is None or cuda.pitch_of(stack) == (channels_of or stack.shape[1])
            x, residual, out = last(x, residual, out)
            table = stage(counts, indices, places, block, image)
            assert (x.shape[0], places.shape[0], tuple(places.shape[1:])) == (rows, images, grid)
            ends = [
                (o - 1) * s + d * (k - 1) + 1 - n - p
                for o, s, d, k, n, p in zip(
                    image_out, strides, dilation, kernel, image, pads, strict=True
                )
            ]
            padding = [(p, max(a, 0)) for p, a in zip(pads, ends, strict=True)]
            y = sb.stack_conv2d(
                x.numpy(), weight.numpy(), table, strides=strides,
                padding=tuple(padding), dilation=dilation,
                groups=channels // (1 if depthwise else (group or (channels,))[0]),
                w_format="OIHW", scale=None,
                bias=None if bias is None else bias.numpy(),
                residual=None if residual is None or activation < 0 else residual.numpy(),
                activation=ACTIVATIONS[activation] if 0 <= activation < 4 else None,
            )  # fmt: skip
            assert y.shape[1:] == (*block_out, channels_out)
            after = stage(counts, indices, places, block_out, image_out)
            inside = torch.from_numpy(sb.stack_pixel_mask(after)[..., None])
            y = torch.from_numpy(y).where(inside, 0)  # as kernels do
            if activation < 0:
                y = activated(y, activation & 0x7FFFFFFF) + residual
            elif activation >= 4:
                y = activated(y, activation)
            assert (scaled is not None) == scales_last
            if scales_last:
                names[-1] += " scaled last"
                assert scaled.is_contiguous() and scaled.dtype == torch.float32
                assert scaled.shape[1] % 256 == 0 and scaled.shape[1] >= channels_out
                scale, shift = scaled[:, :channels_out].to(y.dtype)
                y = (y * scale + shift).where(inside, 0)
            if unfolded is not None:
                names[-1] += " unfolded"
                m, h, w, _ = y.shape
                y = y.view(m, h, w, *unfolded, -1).permute(0, 1, 3, 2, 4, 5)
                y = y.reshape(m, h * unfolded[0], w * unfolded[1], -1)
            out.copy_(y)

        if unfolded is not None and channels_out // math.prod(unfolded) * dtype.itemsize % 16:
            return None  # no whole vectors
        if depthwise:
            launch = lambda x, w, scale, b, *rest: run(x, w, b, *rest)  # noqa: E731
        else:
            launch = lambda x, packed, *rest: run(x, *packed, *rest)  # noqa: E731
        return launch, None, True

    def prepare_fresh(
        dtype, rows, images, grid, block, size, shape, steps, source, stride, pads, dilation,
        turned, clear_rows,
    ):  # fmt: skip
        kernel, (out, channels) = shape[2:], shape[1::-1] if turned else shape[:2]
        block_out, size_out = cuda.sizes_after(block, size, kernel, stride, pads, dilation)
        run = prepare_conv(
            dtype, rows, images, grid, block, block_out, size, size_out, channels, out, kernel,
            stride, dilation, (pads[0], pads[2]), 0, False, None, (None,) * 3, None, False,
            clear_rows, (channels, out),
        )[0]  # fmt: skip

        def launch(x, weight, bias, packed, *lists_and_y):
            assert weight.stride() == steps and weight.dtype == source
            weight = weight.detach().to(dtype)
            weight = weight.flip(2, 3).transpose(0, 1) if turned else weight
            run(x, (weight.contiguous(), bias), None, *lists_and_y)

        return launch, 1, True, block_out

    def prepare_halo(
        dtype, rows, channels, images, grid, block, image, pads, kind, clear_rows
    ):  # fmt: skip
        def launch(x, counts, indices, places, out):
            names.append("halo " + kind)
            x, out = last(x, out)
            fill = {"zero": 0, "lowest": "-inf", "nearest": "edge"}[kind]
            table = stage(counts, indices, places, block, image)
            y = sb.stack_halo(x.numpy(), table, (pads[:2], pads[2:]), fill=fill)
            out.copy_(torch.from_numpy(y))

        return launch

    def prepare_image_conv(
        dtype, rows, images, grid, block, block_out, image, image_out, channels, channels_out,
        kernel, strides, dilation, pads, activation, steps, alignment, settled, clear_rows,
    ):  # fmt: skip
        facts = (
            dtype, rows, images, grid, block, block_out, image, image_out, channels, channels_out,
            kernel, strides, dilation, pads, activation, False, None, (None,) * 3, None, False,
            False, (channels, channels_out),
        )  # fmt: skip
        conv = prepare_conv(*facts)[0]

        def launch(x, packed, counts, indices, places, out, *scaled):
            assert tuple(x.stride(axis) for axis in (0, 2, 3, 1)) == steps
            assert x.data_ptr() % alignment == 0
            table = stage(counts, indices, places, block, image)
            x = np.ascontiguousarray(x.permute(0, 2, 3, 1).numpy())
            stack = torch.from_numpy(sb.stack_from_image(x, table))
            lists = counts, indices, places
            conv(stack.permute(0, 3, 1, 2), packed, None, *lists, out, *scaled)
            names[-1] = names[-1].replace("conv", "image")

        return launch, None

    def assert_lies(stack, part_of, alignment=1):
        """Assert that the pixels of a stack ``[M, h, w, C]`` lie as a kernel was told."""
        assert cuda.pitch_of(stack.permute(0, 3, 1, 2)) == (part_of or stack.shape[3])
        assert stack.data_ptr() % alignment == 0 and (part_of or stack.is_contiguous())

    def prepare_affine(
        dtype, scale_dtype, residual_dtype, out_dtype, rounded_dtype, rows, images, block,
        channels, per_image, activation, part_of, added_part_of, out_part_of, alignment, settled,
    ):  # fmt: skip
        def launch(x, scale, shift, residual, slopes, counts, indices, out, rounded):
            names.append("affine")
            assert_lies(x, part_of, alignment)
            if residual is not None:
                width = residual.element_size() * alignment // x.element_size()
                assert_lies(residual, added_part_of, width if added_part_of else 1)
            assert_lies(out, out_part_of, alignment if out_part_of else 1)
            assert tuple(x.shape) == (rows, *block, channels) and x.dtype == dtype
            assert all(t is None or t.dtype == scale_dtype for t in (scale, shift))
            assert residual is None or residual.dtype == residual_dtype
            assert out.dtype == out_dtype
            count = int(counts)
            image = indices[:count, 0].long() if per_image else torch.zeros(count).long()
            y = x[:count]
            if scale is not None:
                y = y * scale.view(-1, channels)[image, None, None]
            if shift is not None:
                y = y + shift.view(-1, channels)[image, None, None]
            y = y if residual is None else y + residual[:count]
            out.fill_(torch.nan)
            if activation == "prelu":
                assert slopes.shape == (channels,) and slopes.dtype == torch.float32
                assert slopes.is_contiguous() and slopes.data_ptr() % 16 == 0
                out[:count] = torch.where(y < 0, y * slopes, y)
            else:
                assert slopes is None
                out[:count] = activated(y, activation)
            assert (rounded_dtype != out_dtype) == (rounded is not None)
            if rounded is not None:
                names[-1] = "affine of both"
                rounded.copy_(out)

        return launch

    def prepare_sum(
        dtype, rows, height, width, channels, factors, activation, alignment, parts_of,
        out_part_of, settled,
    ):  # fmt: skip
        def launch(*given):
            names.append("sum")
            *stacks, counts, out = given
            assert stacks[len(factors) :] == [None] * (4 - len(factors)) and len(factors) > 1
            count, y = int(counts), None
            for x, part_of, factor in zip(stacks, parts_of, factors, strict=False):
                names[-1] += " {}x{}".format(*factor)
                assert_lies(x, part_of, alignment)
                block = (height // factor[0], width // factor[1])
                assert tuple(x.shape) == (rows, *block, channels) and x.dtype == dtype
                x = x[:count].repeat_interleave(factor[0], 1).repeat_interleave(factor[1], 2)
                y = x if y is None else y + x
            names[-1] += f" {ACTIVATIONS[activation]}" if 0 < activation < 4 else ""
            assert_lies(out, out_part_of, alignment)
            assert tuple(out.shape) == (rows, height, width, channels) and out.dtype == dtype
            out.fill_(torch.nan)
            out[:count] = activated(y, activation)

        return launch

    def prepare_linear(dtype, images, channels, channels_out, activation):
        def launch(x, weight, bias, out):
            names.append("image linear")
            assert tuple(x.shape[:2]) == (images, channels) and x.dtype == dtype
            y = torch.nn.functional.linear(x.flatten(1), weight.flatten(1), bias)
            y = activated(y, activation)
            out.copy_(y.view(images, channels_out, *x.shape[2:]))

        return launch

    def prepare_layer_norm(dtype, scale_dtype, out_dtype, rows, block, channels, eps, settled):
        def launch(x, scale, shift, counts, out):
            names.append("layer norm")
            assert tuple(x.shape) == (rows, *block, channels) and x.dtype == dtype
            assert all(t is None or t.dtype == scale_dtype for t in (scale, shift))
            assert out.dtype == out_dtype
            count, norm = int(counts), torch.nn.functional.layer_norm
            out.fill_(torch.nan)
            wide = x[:count] if dtype == scale_dtype else x[:count].to(scale_dtype)
            out[:count] = norm(wide, (channels,), scale, shift, eps)

        return launch

    def prepare_image_norm(norm, parameter, in_group, eps, settled):
        def launch(x, counts, indices, weight, bias, partials, moments, scale, shift):
            names.append("image norm")
            count, channels = int(counts), norm.channels
            assert tuple(x.shape) == (norm.rows, channels, *norm.block)
            assert partials.numel() == norm.image_partials
            assert moments.numel() == (norm.moments if in_group > 1 else 0)
            table = sb.BlockTable(
                counts.numpy(), indices.numpy(), np.zeros((norm.images, *norm.grid), np.int32),
                norm.block, norm.image,
            )  # fmt: skip
            inside = torch.from_numpy(sb.stack_pixel_mask(table)[:count])
            for n in range(norm.images):
                own = indices[:count, 0] == n
                pixels = x[:count].permute(0, 2, 3, 1)[own][inside[own]].double()
                image = torch.zeros(math.prod(norm.image), channels, dtype=torch.float64)
                image[: len(pixels)] = pixels
                each = image.unflatten(1, (-1, in_group))
                variance, mean = torch.var_mean(each, (0, 2), correction=0)
                mean, variance = (t.repeat_interleave(in_group) for t in (mean, variance))
                scale[n] = torch.rsqrt(variance + eps) * (1 if weight is None else weight)
                shift[n] = (0 if bias is None else bias) - mean * scale[n]

        return launch

    def prepare_scatter(dtype, rows, images, grid, block, size, channels, kind, outside, alignment):
        def launch(x, counts, places, background, out):
            names.append("scatter")
            assert (x.shape[0], places.shape) == (rows, (images, *grid))
            on = places.numpy()
            indices = np.full((rows, 3), -1, np.int32)
            indices[on[on >= 0]] = np.argwhere(on >= 0)
            table = sb.BlockTable(counts.numpy(), indices, on, block, size)
            flat = x.reshape(*x.shape[:3], -1).numpy()
            background = outside if background is None else background.numpy()
            y = sb.stack_to_image(flat, table, background=background)
            out.copy_(torch.from_numpy(y).view(out.shape))

        return launch

    def pool_at(facts):
        """What pooling kernels are asked for, as the core's functions take it."""
        dtype, rows, images, grid, channels, block, size, *more = facts

        def of(x, counts, indices, places):
            assert (x.shape[0], x.shape[3]) == (rows, channels) and x.dtype == dtype
            assert (places.shape[0], tuple(places.shape[1:])) == (images, grid)
            return np.ascontiguousarray(x.numpy()), stage(counts, indices, places, block, size)

        return of, more

    def write(out, y, x, lie):
        """Write a result, of x, where both lie as a kernel was told."""
        part_of, out_part_of, alignment = lie
        for array, its in ((x, part_of), (out, out_part_of)):
            assert_lies(array, its, alignment if part_of or out_part_of else 1)
        out.copy_(torch.from_numpy(y))

    def prepare_windows(facts, function, **options):
        (at, (out_block, *_, kernel, strides, _, pads, lie)) = pool_at(facts)
        options |= {"kernel": kernel, "strides": strides, "padding": (pads[:2], pads[2:])}

        def launch(x, counts, indices, places, out):
            names.append(function.__name__)
            given = at(x, counts, indices, places)
            try:  # kernels fill the blocks, whatever the result's size
                y = function(*given, ceil_mode=True, **options)
            except sb.ShapeError:
                y = function(*given, **options)
            assert y.shape[1:3] == out_block
            write(out, y, x, lie)

        return launch, True

    def prepare_max_pool(*facts, settled):
        usual = prepare_windows(facts, sb.stack_max_pool, dilation=facts[-3])
        at, (out_block, zeros_around, kernel, strides, dilation, pads, lie) = pool_at(facts)

        def launch(x, counts, indices, places, out):
            names.append("maxima with zeros around")
            image = torch.from_numpy(sb.stack_to_image(*at(x, counts, indices, places)))
            image = torch.nn.functional.pad(image.permute(0, 3, 1, 2), (*pads[2:], *pads[:2]))
            y = torch.nn.functional.max_pool2d(image, kernel, strides, 0, dilation)
            y = np.ascontiguousarray(y.permute(0, 2, 3, 1).numpy())
            table = stage(counts, indices, places, out_block, y.shape[1:3])
            write(out, sb.stack_from_image(y, table), x, lie)

        return (launch, True) if zeros_around else usual

    def prepare_avg_pool(*facts, settled):
        include, divisor = facts[8:10]
        counting = {"count_include_pad": include, "divisor": divisor}
        return prepare_windows(facts, sb.stack_avg_pool, **counting)

    def prepare_global_pool(*facts, settled):
        at, (windows, mode, part_of) = pool_at(facts)

        def launch(x, counts, indices, places, out):
            assert_lies(x, part_of)
            given = at(x, counts, indices, places)
            if windows == (1, 1):
                names.append("stack_global_pool")
                y = torch.from_numpy(sb.stack_global_pool(*given, mode=mode))
            else:
                names.append("windows of images")
                image = torch.from_numpy(sb.stack_to_image(*given)).permute(0, 3, 1, 2)
                kind = {"mean": "avg", "max": "max"}[mode]
                pool = getattr(torch.nn.functional, f"adaptive_{kind}_pool2d")
                y = pool(image, windows).permute(0, 2, 3, 1)
            out.copy_(y)

        return launch, True

    def prepare_interpolate(*facts, settled):
        at, (to, mode, steps, of_images, lie) = pool_at(facts)
        rows, size = facts[1], facts[6]
        sides = list(zip(size, steps, facts[3], to, strict=True))
        new = [round(n / s) if s else grid * b for n, s, grid, b in sides]
        if mode == "bilinear corners":
            new = [round((n - 1) / s) + 1 if s else grid * b for n, s, grid, b in sides]

        def interpolate_images(x, counts, indices, places, out):
            names.append("images interpolated")
            options = {"mode": mode.split()[0], "align_corners": mode.endswith("corners")}
            image = torch.nn.functional.interpolate(x.permute(0, 3, 1, 2), new, **options)
            image = np.ascontiguousarray(image.permute(0, 2, 3, 1).numpy())
            y = sb.stack_from_image(image, stage(counts, indices, places, to, tuple(new)))
            out.copy_(torch.from_numpy(y))

        def launch(x, counts, indices, places, out):
            names.append("stack_interpolate")
            values, table = at(x, counts, indices, places)
            factor = [t / b for t, b in zip(to, table.block_size, strict=True)]
            y = sb.stack_interpolate(
                values, table, scale_factor=tuple(factor), size=tuple(new), mode=mode.split()[0],
                align_corners=mode.endswith("corners"),
            )  # fmt: skip
            assert len(y) == rows
            write(out, y, x, lie)

        return interpolate_images if of_images else launch, True

    def prepare_concat(
        rows, block, channels, itemsize, unfolded, enlarged, factors, pitches, alignment, pitch,
        firsts,
    ):  # fmt: skip
        def launch(*given):
            names.append("stack_concat")
            *inputs, counts, out = given
            assert (out.stride(2), out.stride(3)) == (pitch, 1) and out.data_ptr() % alignment == 0
            parts, (fh, fw) = [], factors
            for k, x in enumerate(inputs):
                assert x.data_ptr() % alignment == 0
                assert k in unfolded or (x.stride(2), x.stride(3)) == (pitches[k], 1)
                if k in unfolded:
                    m, h, w, _ = x.shape
                    x = x.view(m, h, w, fh, fw, -1).permute(0, 1, 3, 2, 4, 5)
                    x = x.reshape(m, *block, -1)
                elif k in enlarged:
                    x = x.repeat_interleave(fh, 1).repeat_interleave(fw, 2)
                parts.append(x)
            assert tuple(p.shape[3] for p in parts) == channels and len(inputs[0]) == rows
            for part, first in zip(parts, firsts, strict=True):
                out[: int(counts), ..., first : first + part.shape[3]] = part[: int(counts)]

        return launch

    def pack(x, weight, bias, _, kept="_stack_packed"):
        scale = getattr(weight, "_stack_scale", None)
        packed = weight if scale is None else weight * scale.view(-1, 1, 1, 1)
        setattr(weight, kept, (bias, (packed, bias)))
        return packed, bias

    def no_gradient(x):
        return not (torch.is_grad_enabled() and x.requires_grad)

    monkeypatch.setattr(cuda, "serves", no_gradient)
    monkeypatch.setattr(cuda, "multiplies", lambda dtype: True)
    monkeypatch.setattr(onednn, "_MULTIPLIES", False)  # as on a GPU
    monkeypatch.setattr(cuda, "_at_home", lambda x: contextlib.nullcontext(-1))
    monkeypatch.setattr(cuda, "start", start)
    monkeypatch.setattr(cuda, "_packed", pack)
    monkeypatch.setattr(cuda_weights, "_prepare", prepare_fresh)
    monkeypatch.setattr(cuda_weights, "_PLANS", {})
    monkeypatch.setattr(cuda, "_prepare_conv", prepare_conv)
    monkeypatch.setattr(cuda, "_prepare_halo", prepare_halo)
    monkeypatch.setattr(cuda, "_PLANS", {})
    monkeypatch.setattr(cuda_affine, "_prepare", prepare_affine)
    monkeypatch.setattr(cuda_affine, "_prepare_linear", prepare_linear)
    monkeypatch.setattr(cuda_affine, "_prepare_layer_norm", prepare_layer_norm)
    monkeypatch.setattr(cuda_affine, "_PLANS", {})
    monkeypatch.setattr(cuda_norm, "_prepare_image_norm", prepare_image_norm)
    monkeypatch.setattr(cuda_ends, "_moves", no_gradient)
    monkeypatch.setattr(cuda_ends, "_prepare_conv", prepare_image_conv)
    monkeypatch.setattr(cuda_ends, "_prepare_scatter", prepare_scatter)
    monkeypatch.setattr(cuda_ends, "_PLANS", {})
    monkeypatch.setattr(cuda_pool, "_prepare_max_pool", prepare_max_pool)
    monkeypatch.setattr(cuda_pool, "_prepare_avg_pool", prepare_avg_pool)
    monkeypatch.setattr(cuda_pool, "_prepare_global_pool", prepare_global_pool)
    monkeypatch.setattr(cuda_pool, "_prepare_interpolate", prepare_interpolate)
    monkeypatch.setattr(cuda_pool, "_PLANS", {})
    monkeypatch.setattr(cuda_resize, "_prepare_concat", prepare_concat)
    monkeypatch.setattr(cuda_resize, "_PLANS", {})
    monkeypatch.setattr(cuda_sum, "_prepare", prepare_sum)
    monkeypatch.setattr(cuda_sum, "_PLANS", {})
    monkeypatch.setattr(shortcuts, "prepare", lambda *facts: None)
    return names


@pytest.fixture
def norms_asked(torch, st, monkeypatch):
    """Serve batch norms in training by the core's NumPy bodies; return what was asked for."""
    from sbnet_cupy.block_sparse.stack import stack_batch_norm as norms
    from sbnet_cupy.block_sparse.stack.stack_batch_norm_grad import stack_batch_norm_grad
    from sbnet_cupy.torch.network import cuda, cuda_norm

    names = []

    def stage(norm, counts, indices):
        block, size = norm.block, norm.image
        if indices is None:  # sites: blocks of one pixel
            indices = torch.zeros(norm.rows, 3, dtype=torch.int32)
        assert tuple(indices.shape) == (norm.rows, 3)
        each = zip(size, norm.grid, block, strict=True)
        assert not norm.whole or all(n == g * b for n, g, b in each)
        places = np.zeros((norm.images, *norm.grid), np.int32)
        return sb.BlockTable(counts.numpy(), indices.numpy(), places, block, size)

    def native(*tensors):
        return [t if t is None else t.detach().numpy() for t in tensors]

    def prepare_statistics(norm, parameter, eps):
        def launch(x, counts, indices, *given):
            names.append("statistics")
            *own, _, found, momentum = given
            (x,), (weight, bias, mean, variance) = native(*last(x)), native(*own)
            assert all(t is None or t.dtype == parameter for t in own)
            found.numpy()[:] = norms.stack_batch_norm(
                x, stage(norm, counts, indices), weight, bias, eps=eps,
                running_mean=mean, running_var=variance, momentum=momentum,
            ).statistics  # fmt: skip

        return launch, 1

    def prepare_running(norm, parameter, eps):
        def launch(mean, variance, weight, bias, found, _):
            names.append("running")
            found.numpy()[:-1] = norms.statistics_of(*native(mean, variance, weight, bias), eps)

        return launch

    def prepare_norm(norm, code):
        def launch(x, residual, found, counts, indices, out):
            names.append((ACTIVATIONS[code], residual is not None))
            x, residual, out, found = native(*last(x, residual, out), found)
            inside = norms.pixels_inside(x, stage(norm, counts, indices))
            t = norms.before_activation(np.where(inside, x, 0), found, residual)
            out[:] = np.where(inside, norms.apply_activation(t, ACTIVATIONS[code]), 0)

        return launch

    def differentiate(norm, code, grad, x, y, found, counts, indices):
        names.append("gradient")
        table = stage(norm, counts, indices)
        grad, x, y, found = native(*last(grad, x, y), found)
        return stack_batch_norm_grad(grad, x, table, found, y=y, activation=ACTIVATIONS[code])

    def prepare_sums(norm, parameter, code):
        def launch(grad, x, y, found, counts, indices, _, dweight, dbias, factors):
            result = differentiate(norm, code, grad, x, y, found, counts, indices)
            for to, value in ((dweight, result.weight), (dbias, result.bias)):
                if to is not None:
                    to.numpy()[:] = value

        return launch, 1

    def prepare_gradient(norm, code):
        def launch(grad, x, y, found, _, counts, indices, dx, added):
            result = differentiate(norm, code, grad, x, y, found, counts, indices)
            for to, value in zip(last(dx, added), (result.x, result.residual), strict=True):
                if to is not None:
                    to.numpy()[:] = value

        return launch

    def serves(x, table, block, size, parameters):
        return not (table.whole or table.static)

    monkeypatch.setattr(cuda, "_at_home", lambda x: contextlib.nullcontext(-1))
    monkeypatch.setattr(cuda, "start", start)
    monkeypatch.setattr(cuda_norm, "serves", serves)
    for name, function in (
        ("_prepare_statistics", prepare_statistics), ("_prepare_norm", prepare_norm),
        ("_prepare_running", prepare_running), ("_prepare_sums", prepare_sums),
        ("_prepare_gradient", prepare_gradient),
    ):  # fmt: skip
        monkeypatch.setattr(cuda_norm, name, function)
    return names


@pytest.fixture
def units_asked(torch, asked, monkeypatch):
    """Serve residual units too, as the composition of their layers, in float32."""
    from sbnet_cupy.torch.network import bottlenecks, units

    def prepare(
        dtype, rows, images, grid, block, image, channels, widths, bottleneck, inner, activation,
        settled,
    ):  # fmt: skip
        def launch(x, *given):
            *packed, residual, counts, indices, places, out = given
            x, residual, out = last(x, residual, out)
            packed = [p for p in packed if p is not None]
            assert len(packed) == len(widths) == (3 if bottleneck else 2)
            table = sb.BlockTable(*(t.numpy() for t in (counts, indices, places)), block, image)
            assert (x.shape[0], x.shape[3]) == (rows, channels)
            y = x.numpy()
            for number, (weight, bias) in enumerate(packed):
                final = number + 1 == len(packed)
                y = sb.stack_conv2d(
                    y, weight.numpy(), table, w_format="OIHW",
                    bias=None if bias is None else bias.numpy(),
                    residual=residual.numpy() if final and residual is not None else None,
                    activation=ACTIVATIONS[activation if final else inner],
                )  # fmt: skip
            out.copy_(torch.from_numpy(y))
            asked.append("unit")

        return launch, [None] * len(widths)

    def prepare_bottleneck(dtype, rows, images, grid, block, image, channels, width, settled):
        def launch(x, packed, counts, indices, places, out):
            x, out = last(x, out)
            table = sb.BlockTable(*(t.numpy() for t in (counts, indices, places)), block, image)
            assert tuple(x.shape) == (rows, *block, channels)
            assert packed[0].shape[3] == width
            y = x.numpy()
            for kernel, scale, shift in zip(packed[:3], packed[3::2], packed[4::2], strict=True):
                y = np.maximum(y * scale.numpy() + shift.numpy(), 0)
                y = sb.stack_conv2d(y, kernel.numpy(), table)
            out.fill_(torch.nan)
            out[: int(counts)] = x[: int(counts)] + torch.from_numpy(y)[: int(counts)]
            asked.append("bottleneck")

        return launch, lambda *weights: weights, "form"

    def pack(x, weights, pack, form):
        setattr(weights[0], bottlenecks._KEPT, {form: weights})
        return pack(*weights)

    monkeypatch.setattr(units, "prepare", prepare)
    monkeypatch.setattr(bottlenecks, "prepare", prepare_bottleneck)
    monkeypatch.setattr(bottlenecks, "_packed", pack)
    monkeypatch.setattr(bottlenecks, "ELEMENTS", {torch.float32: "float"})
    return asked


@pytest.fixture
def shortcuts_asked(torch, asked, monkeypatch):
    """Serve convolutions with a projection shortcut too, as two of them, in float32."""
    from sbnet_cupy.torch.network import cuda, shortcuts

    def prepare(
        dtype, rows, images, grid, block, image, channels, channels_out, kernel, strides, pads,
        dilation, channels_also, strides_also, activation, parts, settled, clear_rows,
    ):  # fmt: skip
        def launch(x, packed, also, packed_also, counts, indices, places, out):
            for stack, channels_of in zip((x, also, out), parts, strict=True):
                assert cuda.pitch_of(stack) == (channels_of or stack.shape[1])
            x, also, out = last(x, also, out)
            assert (x.shape[0], x.shape[3], also.shape[3]) == (rows, channels, channels_also)
            lists = [t.numpy() for t in (counts, indices, places)]
            table = sb.BlockTable(*lists, block, image)
            padding = (pads[:2], pads[2:])
            after = table.after_conv(kernel, strides, padding, dilation)
            size = [n * s for n, s in zip(after.image_size, strides_also, strict=True)]
            its = sb.BlockTable(*lists, tuple(also.shape[1:3]), tuple(size))
            weights, bias = packed_also
            residual = sb.stack_conv2d(
                also.numpy(), weights.numpy(), its, strides=strides_also, w_format="OIHW",
                bias=bias.numpy(),
            )  # fmt: skip
            weights, bias = packed
            y = sb.stack_conv2d(
                x.numpy(), weights.numpy(), table, strides=strides, padding=padding,
                dilation=dilation, w_format="OIHW", bias=bias.numpy(), residual=residual,
                activation=ACTIVATIONS[activation],
            )  # fmt: skip
            out.copy_(torch.from_numpy(y))
            asked.append("shortcut")

        return launch, [None, None]

    monkeypatch.setattr(shortcuts, "prepare", prepare)
    return asked
