"""The benchmark of the two windows: its forms agree, and it runs to its end."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch


def test_forms_agree() -> None:
    from dual_window import forms

    torch.manual_seed(0)
    leaves = [torch.randn(1, heads, 90, 8, requires_grad=True) for heads in (4, 2, 2)]
    found = {name: form(*leaves) for name, form in forms(90, 40, 20, torch.device("cpu")).items()}
    directions = [torch.randn_like(output) for output in found["dual"]]
    gradients = torch.autograd.grad(found["dual"], leaves, directions, retain_graph=True)
    for name in ("masked passes", "blocked passes"):
        torch.testing.assert_close(found[name], found["dual"], atol=1e-5, rtol=1e-5)
        own = torch.autograd.grad(found[name], leaves, directions)
        torch.testing.assert_close(own, gradients, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found["teacher alone"], found["dual"][:1], atol=1e-5, rtol=1e-5)


def test_it_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import common
    import dual_window

    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(dual_window, "CONVOLUTIONS", ((2, 8, 6),))
    arguments = "--tokens 64 --windows 32 --heads 2 --kv-heads 1 --dim 8 --threads 1 --rounds 2"
    monkeypatch.setattr(sys, "argv", ["dual_window.py", *arguments.split()])
    dual_window.main()
    figures = json.loads((tmp_path / "dual_window.json").read_text())["figures"]["figures"]
    (attention,), (convolution,) = figures["attention"], figures["convolution"]
    assert attention["student_window"] == 16
    for which in ("forward", "forward_backward"):
        assert set(attention[which]["time_saved"]) == {"masked passes", "blocked passes", "teacher alone"}
        assert set(convolution[which]["time_saved"]) == {"conv1d"}
