"""Finds what a loaded model can do on this machine: attention in tiles, several answers in a pass, the same bits.

The bits of a token's KV depend on the tokens before it alone if (1) a row of a product has the same bits whatever rows
are multiplied with it, which oneDNN's products with packed weights guarantee from a few rows on, (2) the position
decides the order in which attention adds (`attention`), and (3) everything else looks at each token alone. All of it is
tested with the model: products with each shape of layer, attention with its heads, and whole passes that are split in
several ways.
"""

from __future__ import annotations

import json
import logging
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import transformers
import xxhash
from torch import Tensor, nn
from transformers import PreTrainedModel

from kp_core.bundled import cache_directory
from kp_core.engines.hf import attention
from kp_core.engines.hf.attention import attend, grouped_rows, keys_to_read, tile_of_each
from kp_core.engines.hf.kinds import PROBE, WINDOW_SIZES
from kp_core.engines.hf.model import CausalModel
from kp_core.engines.hf.packed import PackedLinear, pack_weights
from kp_core.engines.hf.replay import Record, ReplayedRows, Replays, capturing
from kp_core.engines.local.buffer import TILE, KVBuffer
from kp_core.errors import ModelError
from kp_core.kv import KVTensors
from kp_core.packs.blobs import replace_file
from kp_core.progress import bar_of
from kp_core.threads import release_openmp_threads

logger = logging.getLogger(__name__)

_NARROW = PROBE - 3  # Tokens of a sliding window during a probe.
_LEAST_ROWS = (1, 2, 4, 8, 16, 32)
"""Numbers of rows tried for the padding of products, so that a row's bits do not depend on the other rows."""
_ROWS, _COUNTS = 320, (1, 2, 3, 5, 8, 15, 17, 32, 33, 64, 100, 256)
"""Rows of the test batch, and of the parts of it that are tried."""
_TRIES = 64  # Rows tried in total for each length of part, because a difference may show in a few rows only.
_SPREAD = 1.5
_ENOUGH = 2**21  # Outputs of single rows that are tried, if there are so many.
_CUTS = ((1,), (7, 8, 9, 10), (3, 20))
_TOKENS = 24
_SLOW_S = 0.2  # Processor time of the first test from which on the bar is shown before the others.
_KEPT_S = 2.0  # Results of tests that took less processor time are not kept.
_UNPACKED_ROWS = 2048
"""Rows tried in products with matrices that are not packed, where as few as one row in 500 differs."""
_FEWEST_ROWS, _DIVIDED = 321, 2**18
"""Fewest rows and elements for a test of activations, enough for several threads. The number of rows is odd, so that
the boundary between two threads falls within a row."""
_STRIDE = 31  # Tokens between the fillings of a tile that are tried.
_LONG = 2 * TILE + 70
_LONG_CUTS = ((TILE,), (100, 2 * TILE - 3), (2 * TILE + 1, 2 * TILE + 2), (_LONG - 1,), (_LONG - 9, _LONG - 4))


def probed(
    network: PreTrainedModel, *, keep_attention: bool = False, graphs: bool = True, kept: bool = False
) -> CausalModel:
    """`network` as a model that computes as fast and as exactly as tests find that it can here.

    With `kept`, what the tests find on a CPU is read from the user's cache directory if a model of the same shapes was
    tested there, and kept there if they took seconds.
    With `keep_attention`, it keeps the attention it was loaded with, which rounds differently. With `graphs`, short
    passes on CUDA are captured and replayed, if that gives the same logits. Raises `ModelError`, with the
    reason, for architectures that cannot continue from their cache.
    """
    model = CausalModel(network)
    one_pass = partial(model.forward, _probe_ids(model), KVBuffer(model.shape, 2 * PROBE), logits=0)
    model.packed = pack_weights(model.network, one_pass)
    if keep_attention:
        model.engine += f"/{model.config._attn_implementation}"  # noqa: SLF001 - transformers has no public name
    result = _result_of(model) if kept and model.device.type == "cpu" and not model.kind.is_recurrent else None
    if result is None or not _taken(model, result):
        _test(model, keep_attention=keep_attention, result=result)
    if graphs and model.device.type == "cuda" and "batch" not in model.lacks:
        use_replay(model, capturing(model.device))
    release_openmp_threads()  # Other threads may run the requests.
    return model


def _test(model: CausalModel, *, keep_attention: bool, result: Path | None) -> None:
    """Find what `model` can do here, and keep it in the file `result` if it took seconds."""
    started = time.process_time()
    with bar_of("Testing the arithmetic of this model", 3, "test") as bar:
        if not keep_attention:
            _install_attention(model)
        if time.process_time() - started > _SLOW_S:
            bar.refresh()  # Shown at once, as the other tests take ten times as long.
        if model.kind.is_recurrent:
            _check_states(model)
        bar.update()
        lacks = dict(model.lacks)
        is_tiled_here = model.attends and not model.shape.devices
        if "batch" not in lacks and not (is_tiled_here and _batches_agree(model)):
            lacks["batch"] = "its attention is its own, and is not told which tokens belong to which answer"
        if "compose" in lacks:
            lacks["attention"] = lacks["compose"]
        elif not model.attends:
            lacks["attention"] = "its attention is its own, and does not report its weights"
        model.lacks = lacks
        bar.update()
        if why := why_not_bitwise(model, model.packed):
            lacks["bitwise"] = why
        bar.update()
    if result is not None and time.process_time() - started > _KEPT_S:
        rows = [product.rows for product in model.packed]
        found = {"attends": model.attends, "lacks": lacks, "rows": rows}
        with suppress(OSError):
            replace_file(result, [json.dumps(found).encode()])


def _taken(model: CausalModel, result: Path) -> bool:
    """Whether `model` computes as the file `result` says; if not, it is as it was."""
    try:
        found = json.loads(result.read_bytes())
        rows, attends, lacks = (found[name] for name in ("rows", "attends", "lacks"))
    except (OSError, ValueError, TypeError, LookupError):
        return False
    if len(rows) != len(model.packed):
        return False
    if attends:
        model.network.set_attn_implementation(attention.NAME)
    model.attends, model.lacks = attends, lacks
    for product, least in zip(model.packed, rows, strict=True):
        product.rows = least
    return True


def _result_of(model: CausalModel) -> Path:
    """The file for what tests of `model` find, named by all that it depends on: shapes, code, machine and threads."""
    hasher = xxhash.xxh3_128()
    config = {name: value for name, value in model.config.to_dict().items() if name != "_name_or_path"}
    tensors = [(name, str(tensor.dtype), tensor.shape) for name, tensor in model.network.named_parameters()]
    modules = [str(type(module)) for module in model.network.modules()]
    processors = Path("/proc/cpuinfo")  # Where there is one: a cache folder may be that of several machines.
    text = processors.read_text("utf-8") if processors.exists() else platform.processor()
    units = {line for line in text.splitlines() if line.startswith(("model name", "flags", "Features"))} or {text}
    machine = model.numerics, torch.get_num_threads(), transformers.__version__, sorted(units)
    hasher.update(repr((config, tensors, modules, machine)).encode())
    for file in sorted(Path(__file__).parent.glob("*.py")):
        hasher.update(file.read_bytes())
    return cache_directory() / "tested" / f"{hasher.hexdigest()}.json"


@torch.inference_mode()
def _install_attention(model: CausalModel) -> None:
    """Switch to tiled attention if the model accepts it and gives the same logits with it."""
    previous = model.config._attn_implementation  # noqa: SLF001 - transformers has no public name
    if not getattr(model.network, "_supports_attention_backend", False):
        return
    with _narrowed(model):
        expected = _probe_logits(model)
        try:
            model.network.set_attn_implementation(attention.NAME)
            model.attends = True
            tiled_logits = _probe_logits(model)
        except (ValueError, TypeError, RuntimeError, LookupError) as error:
            logger.info("%s keeps %s attention: %s", model.config.model_type, previous, error)
            tiled_logits = None
    # In bfloat16, the logits of Gemma 3 differ by 8 % from those in float32, and by 6 % from those of tiles.
    if tiled_logits is None or not _logits_agree(model, tiled_logits, expected, rounding=0.1):
        model.network.set_attn_implementation(previous)
        model.attends = False


def _check_states(model: CausalModel) -> None:
    """Refuse a model whose logits differ between one pass and passes that continue from its states."""
    resumed, expected = _probe_logits(model)[1:], _probe_logits(model, (0, 2 * PROBE - 1, 2 * PROBE))
    # In bfloat16, a mixture of experts may choose another expert. A lost state changes the logits more.
    if not _logits_agree(model, resumed, expected, rounding=0.2):
        off = (torch.cat(resumed) - torch.cat(expected)).float().norm() / torch.cat(expected).float().norm()
        raise ModelError(
            f"{model.config.model_type} cannot be served from packs: with the installed transformers it does not go "
            f"on from the states of its recurrent layers (after {PROBE} tokens its logits are off by "
            f"{float(off):.0%})."
        )


def _batches_agree(model: CausalModel) -> bool:
    """Whether several sequences decoded in one pass get the logits that each gets alone."""
    with _narrowed(model):
        buffers, alone = _probe_rows(model), _probe_rows(model)
        token = _probe_ids(model)[-1]
        tokens = [[token], [token, token]]
        try:
            steps = [model.rows(buffers)([token, token]), model.ragged(buffers, tokens)]
        except (ValueError, TypeError, RuntimeError, AttributeError) as error:
            logger.info("%s decodes sequences one by one: %s", model.config.model_type, error)
            return False
        expected = [
            model.forward(ids, buffer)
            for step in ([[token], [token]], tokens)
            for ids, buffer in zip(step, alone, strict=True)
        ]
    return _logits_agree(model, steps, expected)


def use_replay(model: CausalModel, record: Record) -> None:
    """Replay passes that `record` records, if that gives the same logits: of decoding, and of short questions.

    Logs why not.
    """
    tokens = _probe_ids(model)[-PROBE // 2 :]
    questions = [tokens[:count] for count in range(1, len(tokens))]

    def passes(by: Record | None) -> list[Tensor]:
        """Logits of `tokens` behind each of two buffers, then of `questions` behind the first; none if not recorded."""
        buffers = _probe_rows(model)
        steps, asked = ReplayedRows(model, buffers, by), ReplayedRows(model, buffers[:1], by, len(tokens))
        found = [steps.step(buffers, [[token] for _ in buffers]) for token in tokens]
        found += [asked.step(buffers[:1], [question]) for question in questions]
        return found if by is None or (steps.replay and asked.replay) else []

    with _narrowed(model):
        try:
            replayed, computed = passes(record), passes(None)
        except (ValueError, TypeError, RuntimeError, AttributeError) as error:
            logger.warning("Passes are not recorded: %s", error)
            return
        buffers = _probe_rows(model)
        plain = [model.forward([token], buffer) for token in tokens for buffer in buffers]
        plain += [model.forward(question, buffers[0]) for question in questions]
    if not replayed:  # It was said why.
        return
    # The same kernels give the same numbers. Other kernels round differently.
    if _logits_agree(model, replayed, computed, rounding=1e-3) and _logits_agree(model, computed, plain):
        model.replays = Replays(model, record)
    else:
        logger.warning("Passes are not recorded: replayed, they give other logits.")


def _probe_rows(model: CausalModel) -> list[KVBuffer]:
    """Two buffers with other numbers of tokens."""
    buffers = [KVBuffer(model.shape, 2 * PROBE) for _ in range(2)]
    for row, buffer in enumerate(buffers):
        model.forward(_probe_ids(model)[: PROBE + row], buffer, logits=0)
    return buffers


def _probe_ids(model: CausalModel) -> list[int]:
    """Random tokens: the first of a vocabulary are special ones, behind which some models amplify rounding errors."""
    vocabulary, generator = model.text.vocab_size, torch.Generator().manual_seed(0)
    return list(torch.randint(vocabulary, (2 * PROBE,), generator=generator).tolist())


def _probe_logits(model: CausalModel, edges: Sequence[int] = (0, PROBE, 2 * PROBE - 1, 2 * PROBE)) -> list[Tensor]:
    """Logits at the last token of each pass between `edges`: by default a prefill, another pass, a decode step."""
    ids, buffer = _probe_ids(model), KVBuffer(model.shape, 2 * PROBE)
    return [model.forward(ids[start:stop], buffer) for start, stop in pairwise(edges)]


@contextmanager
def _narrowed(model: CausalModel) -> Iterator[None]:
    """Shorten sliding windows to a few tokens, so that a probe is longer than a window."""
    kind, text, sizes = model.kind, model.text, dict[str, int]()
    try:
        model.kind = replace(kind, windows=tuple(size and min(size, _NARROW) for size in kind.windows))
        for name in WINDOW_SIZES if any(kind.windows) else ():
            # Some configurations have no single size, because layers differ, or cannot be changed.
            with suppress(AttributeError, NotImplementedError, RuntimeError, ValueError):
                if size := getattr(text, name):
                    setattr(text, name, min(size, _NARROW))
                    sizes[name] = size
        yield
    finally:
        model.kind = kind
        for name, size in sizes.items():
            setattr(text, name, size)


def _logits_agree(
    model: CausalModel, found: Sequence[Tensor], expected: Sequence[Tensor], rounding: float = 0.05
) -> bool:
    """Whether logits are equal up to a relative error: 1e-3 in float32, `rounding` in shorter dtypes."""
    mine, theirs = torch.cat([*found]).float(), torch.cat([*expected]).float()
    tolerance = 1e-3 if model.shape.dtype == torch.float32 else rounding
    return bool(((mine - theirs).norm(dim=1) <= tolerance * theirs.norm(dim=1)).all())


def why_not_bitwise(  # noqa: PLR0911 - one return for each reason
    model: CausalModel, packed: Sequence[PackedLinear]
) -> str:
    """Why bits depend on how a prompt is split into passes, as a clause; blank if the tests found that they do not."""
    shape = model.shape
    if shape.device.type != "cpu" or shape.devices:
        return "products and attention of an accelerator round by the number of rows"
    if shape.states:
        return "recurrent layers round by the number of tokens in a pass"
    if not model.attends:
        return "its attention is its own"
    linear = [module for module in model.network.modules() if isinstance(module, nn.Linear)]
    if not pad_rows(linear, packed) or not _others_agree(model.network, linear):
        return "products of its layers round by the number of rows on this processor"
    if not _activations_agree(model):
        return "activations round by where threads divide them"
    if not _attention_agrees(model):
        return "attention rounds by the number of rows on this processor"
    return "" if _passes_agree(model) else "passes that are cut in other places give other bits"


def _others_agree(network: nn.Module, linear: Sequence[nn.Linear]) -> bool:
    """Whether products with matrices outside of linear layers, such as those of experts, round each row separately."""
    embeddings = [module for module in network.modules() if isinstance(module, nn.Embedding)]
    layer_weights = {id(layer.weight) for layer in (*linear, *embeddings)}
    unpacked = {
        parameter.shape[-2:]: parameter
        for parameter in network.parameters()
        if parameter.ndim > 1 and id(parameter) not in layer_weights
    }
    for weight in unpacked.values():
        matrix = weight.detach().reshape(-1, *weight.shape[-2:])[0]
        for operand in (matrix, matrix.T):
            product = partial(nn.functional.linear, weight=operand)
            if not rows_agree(product, operand.shape[1], operand.dtype, rows=_UNPACKED_ROWS, tries=_UNPACKED_ROWS):
                return False
    return True


def _activations_agree(model: CausalModel) -> bool:
    """Whether activation functions give each row the same bits.

    torch divides the elements among threads, and computes the last few of each part differently.
    """
    width = getattr(model.text, "intermediate_size", None)
    if not isinstance(width, int):
        return True
    rows = max(_FEWEST_ROWS, _DIVIDED // width | 1)
    # Some models slice the gate out of a product that is twice as wide, so its rows are not contiguous.
    is_half = any(isinstance(layer, nn.Linear) and layer.out_features == 2 * width for layer in model.network.modules())
    leaves = [
        layer for layer in model.network.modules() if not [*layer.children(), *layer.parameters(), *layer.buffers()]
    ]
    for module in {type(layer): layer for layer in leaves}.values():
        with suppress(TypeError, ValueError, RuntimeError, AttributeError, LookupError):  # Not a function of rows.
            if not rows_agree(module, width, model.shape.dtype, rows=rows):
                return False
            half = partial(lambda module, part: module(part[..., :width]), module)
            if is_half and not rows_agree(half, 2 * width, model.shape.dtype, rows=rows):
                return False
    return True


@torch.inference_mode()
def _attention_agrees(model: CausalModel) -> bool:
    """Whether attention over more than two tiles gives the same bits in parts, for each shape of heads."""
    generator = torch.Generator().manual_seed(0)
    config = model.text
    for kv_heads, dim, value_dim in sorted(set(model.shape.layers)):
        heads = max(kv_heads, int(getattr(config, "num_attention_heads", kv_heads)) // kv_heads * kv_heads)
        query, key, value = (
            torch.randn(1, count, _LONG, width, generator=generator).to(model.shape.dtype)
            for count, width in ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))
        )
        expected = attend(query, key, value, range(_LONG))
        for cuts in _LONG_CUTS:
            for start, stop in pairwise((0, *cuts, _LONG)):
                part = attend(query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop], range(start, stop))
                if not torch.equal(part, expected[:, :, start:stop]):
                    return False
        # The first keys of a tile must give the same bits as the whole tile with the other keys masked. Values are
        # padded to the width of keys, as `attend` does.
        value = nn.functional.pad(value, (0, max(dim - value_dim, 0)))
        grouped, _ = grouped_rows(query[:, :, :1], kv_heads)
        for visible in range(1, TILE, _STRIDE):
            mask = grouped.new_zeros(1, 1, grouped.shape[2], TILE)
            mask[..., visible:] = -torch.inf
            short, whole = (
                tile_of_each(grouped, key[:, :, :keys], value[:, :, :keys], mask[..., :keys], None)
                for keys in (keys_to_read(visible), TILE)
            )
            if not all(map(torch.equal, short, whole)):
                return False
    return True


@torch.inference_mode()
def _passes_agree(model: CausalModel) -> bool:
    """Whether passes over a few tokens agree: in one pass, in parts, and over two sequences at a time."""
    vocabulary = model.network.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocabulary, (_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()

    def computed(*cuts: int) -> tuple[Tensor, KVTensors]:
        """Logits and KV of all tokens, computed in passes between the `cuts`."""
        buffer = KVBuffer(model.shape, _TOKENS)
        parts = [model.forward(ids[start:stop], buffer, stop - start) for start, stop in pairwise((0, *cuts, _TOKENS))]
        return torch.cat(parts), buffer.read(0, _TOKENS)

    logits, kv = computed()
    for cuts in _CUTS:
        logits_in_parts, kv_in_parts = computed(*cuts)
        if not (torch.equal(logits_in_parts, logits) and kv_in_parts.equal(kv)):
            return False
    for counts in ((12, 9), (1, 1)) if "batch" not in model.lacks else ():  # Several new tokens each, and one.
        buffers = [KVBuffer(model.shape, _TOKENS) for _ in counts]
        for buffer in buffers:
            buffer.append(kv.slice(0, 10))
        parts = [ids[10 : 10 + count] for count in counts]
        is_step = max(counts) == 1
        found = model.rows(buffers)([part[0] for part in parts]) if is_step else model.ragged(buffers, parts)
        for row, buffer, count in zip(found, buffers, counts, strict=True):
            expected = kv.slice(0, 10 + count)
            if not (torch.equal(row, logits[9 + count]) and buffer.read(0, 10 + count).equal(expected)):
                return False
    return True


@torch.inference_mode()
def pad_rows(layers: Sequence[nn.Linear], packed: Sequence[PackedLinear]) -> bool:
    """Pad `packed` products to as few rows as give each row the same bits in any batch; whether that succeeds.

    One product of each shape is tested. Those of `layers` that are not packed must agree as they are.
    """
    shapes: dict[tuple[int, int], list[PackedLinear]] = {}
    for product in packed:
        shapes.setdefault((product.in_features, product.out_features), []).append(product)
    for same_shape in shapes.values():
        for least in _LEAST_ROWS:
            for product in same_shape:
                product.rows = least
            # A difference shows in any output: 16 rows of a head of 150,000 say more than 320 of a narrow layer.
            most = max(_ENOUGH // same_shape[-1].out_features, 16)
            if rows_agree(same_shape[-1], same_shape[-1].in_features, same_shape[-1].dtype, most=most):
                break
        else:
            return False
    packed_ids = {id(layer) for product in packed for layer in product.layers}
    unpacked = {(layer.in_features, layer.out_features): layer for layer in layers if id(layer) not in packed_ids}
    return all(rows_agree(_product_of(layer), layer.in_features, layer.weight.dtype) for layer in unpacked.values())


def _product_of(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    """The matrix product of a layer alone: a subclass of `nn.Linear` may do more, and weights may need the layer."""
    is_plain = type(layer).forward is nn.Linear.forward
    return layer if is_plain else partial(nn.functional.linear, weight=layer.weight, bias=layer.bias)


@torch.inference_mode()
def rows_agree(  # noqa: PLR0913 - how much is tried
    multiply: Callable[[Tensor], Tensor],
    width: int,
    dtype: torch.dtype,
    *,
    rows: int = _ROWS,
    tries: int = _TRIES,
    most: int = _UNPACKED_ROWS,
) -> bool:
    """Whether a product of rows of `width` elements gives each row the same bits, whatever the other rows are.

    At most `most` single rows, and as many parts of each other length, are tried of the `rows`.
    The elements differ strongly in size: when a few large ones are added to many small ones, the order changes the sum.
    """
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(1, rows, width, generator=generator)
    batch = (plain * torch.exp(_SPREAD * torch.randn(plain.shape, generator=generator))).to(dtype)
    expected = multiply(batch)
    singles, tries = range(0, rows, max(rows // most, 1)), min(tries, most)
    for count in _COUNTS:
        # Libraries most often have a separate kernel for a single row.
        starts = torch.randint(rows - count + 1, (max(tries // count, 2),), generator=generator).tolist()
        for start in singles if count == 1 else starts:
            if not torch.equal(multiply(batch[:, start : start + count]), expected[:, start : start + count]):
                return False
    return True
