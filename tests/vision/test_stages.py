"""What each training stage trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ttmem import VisionError
from ttmem.vision import STAGES, MergerSettings, Stage, install, stage_parameters


def test_the_papers_stages(make_vision_network: Callable[..., Any], make_inputs: Callable[..., Any]) -> None:
    network = make_vision_network()
    install(network, MergerSettings("ttr-conv", 3))
    first, second = (set(stage_parameters(network, stage)) for stage in STAGES)
    names = {name for name, _ in network.named_parameters()}
    assert first == {name for name in names if "merger" in name}
    assert second == first | {name for name in names if "language_model" in name or "lm_head" in name}
    assert [stage.lr for stage in STAGES] == [1e-3, 2e-5]
    for stage in (STAGES[1], STAGES[0]):
        chosen = stage_parameters(network, stage)
        network.zero_grad()
        inputs = make_inputs(3)
        network(**inputs, labels=inputs["input_ids"]).loss.backward()
        for name, parameter in network.named_parameters():
            assert (parameter.grad is not None) == (name in chosen), name


def test_a_stage_that_trains_nothing_is_refused() -> None:
    with pytest.raises(VisionError, match="no parameters"):
        stage_parameters(torch.nn.Linear(2, 2), Stage("mergers", 1e-3, ("visual.merger.",)))
