"""Sound as files and samples: read, resampled, encoded and named by time; bad sound is refused."""

from __future__ import annotations

import math
import struct
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from normscope import Analyzer
from normscope.inputs.sound import Sound, read_sound, resample
from tests.helpers.compare import refused
from tests.helpers.tiny import tiny
from tests.helpers.zoo import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:normscope has no family")
RATE = 16000


def tone(rate: int, seconds: float = 0.5, pitch: float = 440.0) -> torch.Tensor:
    times = torch.arange(int(rate * seconds), dtype=torch.float64) / rate
    return (0.5 * torch.sin(2 * math.pi * pitch * times)).float()


def wave_file(path: Path, samples: Any, rate: int = RATE, width: int = 2, channels: int = 1) -> Path:
    whole = np.round(np.asarray(samples, dtype=np.float64) * (2 ** (8 * width - 1) - 1)).astype(np.int64)
    kind = {1: "<u1", 2: "<i2", 4: "<i4"}[width]
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes((whole + 128 * (width == 1)).astype(kind).tobytes())
    return path


@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_file_has_the_samples_that_were_written(tmp_path: Path, width: int) -> None:
    found = read_sound(wave_file(tmp_path / "tone.wav", tone(8000), 8000, width), "input_values")
    assert (found.rate, found.seconds) == (8000, 0.5)
    torch.testing.assert_close(found.samples, tone(8000), rtol=0, atol=2.0 ** (2 - 8 * width) + 1e-6)


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_a_tone_is_the_same_tone_at_another_rate(rate: int) -> None:
    """A tone of whole periods, which the spectrum holds exactly."""
    torch.testing.assert_close(resample(Sound(tone(rate), rate), RATE), tone(RATE), rtol=0, atol=1e-6)


def test_a_sound_is_encoded_and_named_by_time(tmp_path: Path) -> None:
    model = tiny_model("wav2vec2", "Wav2Vec2Model")
    extractor = transformers.Wav2Vec2FeatureExtractor()
    lens = Analyzer(model, extractor)
    sound = tone(RATE)
    expected = lens.analyze(extractor(sound.numpy(), sampling_rate=RATE, return_tensors="pt"), scopes="layer")
    for given in (
        wave_file(tmp_path / "tone.wav", sound, width=4),
        {"audio": sound, "sampling_rate": RATE},
        {"audio": tone(48000).numpy(), "sampling_rate": 48000},
        {"audio": str(tmp_path / "tone.wav")},
    ):
        found = lens.analyze(given, scopes="layer")
        torch.testing.assert_close(found["layer"], expected["layer"], rtol=1e-3, atol=1e-4)
    times = [float(token.removesuffix("s")) for token in expected.tokens]
    assert times[0] == 0
    assert times == sorted(times)


def test_whisper_reads_a_sound_of_thirty_seconds_at_most(tmp_path: Path) -> None:
    model = tiny("whisper", "Seq2SeqLM", num_mel_bins=80, max_source_positions=1500)
    extractor = transformers.WhisperFeatureExtractor()
    lens = Analyzer(model)
    lens.loaded.processor = extractor
    given = {"audio": tone(RATE), "sampling_rate": RATE}
    found: Any = lens.analyze((given, {"input_ids": [3, 4, 5]}), scopes="weights", layers=0, rows=[0])
    assert found.encoder.columns[5].token == "0.10s"
    long = {"audio": torch.zeros(31 * RATE), "sampling_rate": RATE}
    refused(lambda: lens.analyze((long, {"input_ids": [3]})), "lasts 31.0 s", "30 s at a time")


def test_bad_sound(tmp_path: Path) -> None:
    lens = Analyzer(tiny_model("wav2vec2", "Wav2Vec2Model"), transformers.Wav2Vec2FeatureExtractor())
    sound = tone(RATE)
    stereo = wave_file(tmp_path / "stereo.wav", torch.stack([sound, -sound], 1).flatten(), channels=2)
    refused(lambda: lens.analyze(stereo), "(2, 8000)", "one channel", "mean(0)")
    refused(lambda: lens.analyze(wave_file(tmp_path / "empty.wav", [])), "empty")
    refused(lambda: lens.analyze({"audio": [], "sampling_rate": RATE}), "empty")
    refused(lambda: lens.analyze({"audio": sound}), "sampling_rate None")
    refused(lambda: lens.analyze(sound), "speech model", "not Tensor")
    refused(lambda: lens.analyze({"audio": sound, "sampling_rate": RATE, "speed": 2}), "Unknown keys", "speed")
    refused(lambda: lens.analyze({"audio": sound.int(), "sampling_rate": RATE}), "between -1 and 1")
    refused(lambda: lens.analyze({"audio": sound * math.nan, "sampling_rate": RATE}), "NaN")
    refused(lambda: lens.analyze({"audio": object(), "sampling_rate": RATE}), "array of numbers")
    refused(lambda: lens.analyze("none.wav"), "no file 'none.wav'")
    broken = tmp_path / "broken.wav"
    broken.write_bytes(b"RIFF" + struct.pack("<I", 9) + b"WAVEfmt ")
    refused(lambda: lens.analyze(broken), "cannot be read as sound")
    other = broken.rename(tmp_path / "broken.flac")
    refused(lambda: lens.analyze(other), "soundfile" if no_soundfile() else "cannot be read as sound")
    refused(lambda: lens.analyze({"audio": stereo, "sampling_rate": 8000}), "16000 samples per second, not 8000")
    refused(lambda: Analyzer(lens.model).analyze(stereo), "one channel")
    mono = wave_file(tmp_path / "mono.wav", sound)
    refused(lambda: Analyzer(lens.model).analyze(mono), "no feature extractor", "input_values")


def no_soundfile() -> bool:
    try:
        import soundfile  # noqa: F401
    except (ImportError, OSError):
        return True
    return False
