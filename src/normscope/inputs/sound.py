"""Sound: files and samples, resampled to the rate of a model and turned into its input by its feature extractor."""

from __future__ import annotations

import os
import wave
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normscope.errors import NormscopeError
from normscope.models.loaded import LoadedModel

WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # bytes of a sample in a wave file


@dataclass(frozen=True)
class Sound:
    """Samples between -1 and 1, and their number per second."""

    samples: Tensor  # (n,), float32
    rate: int

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate


def holds_sound(given: Any) -> bool:
    """Whether an input is a sound, not an encoding of one."""
    return not isinstance(given, Mapping) or "audio" in given


def encode_sound(given: Any, loaded: LoadedModel, key: str) -> dict[str, Any]:
    """The encoding of a path, or of samples with their rate, by the model's feature extractor."""
    sound = read_sound(given, key)
    extractor = _feature_extractor(loaded)
    if extractor is None:
        raise NormscopeError(
            "This Analyzer has no feature extractor, so sound cannot be encoded. In place of the tokenizer, give it "
            "AutoFeatureExtractor.from_pretrained(...), or AutoProcessor for a model with a decoder; or pass a dict "
            f"with {key}."
        )
    rate, most = int(extractor.sampling_rate), getattr(extractor, "n_samples", None)
    found = resample(sound, rate)
    if isinstance(most, int) and len(found) > most:
        raise NormscopeError(
            f"The sound lasts {sound.seconds:.1f} s, but the model reads {most / rate:g} s at a time. Pass a part."
        )
    try:
        return {key: extractor(found.numpy(), sampling_rate=rate, return_tensors="pt")[key]}
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise NormscopeError(f"The feature extractor rejected the sound: {error}") from error


def _feature_extractor(loaded: LoadedModel) -> Any:
    """The feature extractor of a model: its processor's, or the one given in place of a tokenizer."""
    for one in (loaded.processor, loaded.tokenizer):
        found = getattr(one, "feature_extractor", one)
        if callable(found) and hasattr(found, "sampling_rate"):
            return found
    return None


def read_sound(given: Any, key: str) -> Sound:
    """A path of a file, or {"audio": samples or a path, "sampling_rate": ...}, checked. `key` is that of an
    encoding."""
    rate = None
    if isinstance(given, Mapping):
        unknown = {key for key, value in given.items() if value is not None} - {"audio", "sampling_rate"}
        if unknown:
            raise NormscopeError(f"Unknown keys beside audio: {', '.join(sorted(map(str, unknown)))}.")
        given, rate = given["audio"], given.get("sampling_rate")
    if isinstance(given, str | os.PathLike):
        if not Path(given).is_file():
            raise NormscopeError(
                f"This is a speech model: it reads sound, and there is no file {str(given)[:80]!r}. Pass the path of a "
                f"sound, samples, or a dict with {key}."
            )
        found = _read_sound_file(Path(given))
        if rate not in (None, found.rate):
            raise NormscopeError(f"{given} has {found.rate} samples per second, not {rate}. Leave sampling_rate out.")
        return _check_sound(found)
    if isinstance(rate, bool) or not isinstance(rate, int) or rate < 1:
        raise NormscopeError(
            'This is a speech model: pass the path of a sound, {"audio": samples, "sampling_rate": 16000}, or a dict '
            f"with {key}, not {type(given).__name__} with the sampling_rate {rate!r}."
        )
    try:
        samples = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise NormscopeError(f"Sound is an array of numbers, not {type(given).__name__}.") from error
    if not samples.is_floating_point():
        raise NormscopeError("Samples are numbers between -1 and 1. Divide integers by the largest they can be.")
    return _check_sound(Sound(samples.float(), rate))


def _check_sound(sound: Sound) -> Sound:
    """The sound, refused if it is empty or has several channels, or values that are not finite."""
    shape = tuple(sound.samples.shape)
    if sound.samples.numel() == 0:
        raise NormscopeError("The sound is empty.")
    if len(shape) != 1:
        raise NormscopeError(
            f"The sound has the shape {shape}; a model reads one channel. Mix the channels, such as with "
            "samples.mean(0), or pass one of them."
        )
    if not bool(torch.isfinite(sound.samples).all()):
        raise NormscopeError("The sound has NaN or infinite samples.")
    return sound


def _read_sound_file(path: Path) -> Sound:
    """A file as samples (n,), or (channels, n) of several channels: by soundfile if it is installed, or by the standard
    library, which reads .wav only."""
    try:
        soundfile = import_module("soundfile")
    except (ImportError, OSError):  # without the library that it wraps
        if path.suffix.lower() not in (".wav", ".wave"):
            raise NormscopeError(f"Reading {path.suffix} files needs soundfile: pip install soundfile") from None
        return _read_wave_file(path)
    try:
        samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except Exception as error:  # damaged files may raise anything
        raise NormscopeError(f"{path} cannot be read as sound: {error}") from error
    return Sound(_mono(torch.from_numpy(samples).t()), int(rate))


def _read_wave_file(path: Path) -> Sound:
    try:
        with wave.open(str(path), "rb") as file:
            channels, width, rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
            data = bytearray(file.readframes(file.getnframes()))
    except (wave.Error, EOFError, OSError) as error:
        raise NormscopeError(f"{path} cannot be read as sound: {str(error) or 'it ends too early'}.") from error
    if width not in WIDTHS:
        raise NormscopeError(f"{path} has {8 * width} bits per sample, which needs soundfile: pip install soundfile")
    values = torch.frombuffer(data, dtype=WIDTHS[width]).float() if data else torch.zeros(0)
    middle = 128.0 if width == 1 else 0.0
    samples = (values - middle) / 2 ** (8 * width - 1)
    return Sound(_mono(samples.view(-1, channels).t()), rate)


def _mono(samples: Tensor) -> Tensor:
    return samples[0].contiguous() if len(samples) == 1 else samples


def resample(sound: Sound, rate: int) -> Tensor:
    """(n',): the samples at another rate, by their spectrum: ``x'_m = sum_k X_k e^(2 pi i k m / n')`` over the
    frequencies that both rates have."""
    if sound.rate == rate:
        return sound.samples
    count = max(1, round(len(sound.samples) * rate / sound.rate))
    spectrum = torch.fft.rfft(sound.samples.double())[: count // 2 + 1]
    found: Tensor = torch.fft.irfft(spectrum, n=count) * (count / len(sound.samples))
    return found.float()
