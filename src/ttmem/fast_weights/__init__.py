"""Fast weights: layers that learn while they read (TTCD, In-Place TTT, LaCT, and baselines), in pretrained models or
from scratch. Importing this module makes `AutoModelForCausalLM` know them."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from ttmem.fast_weights.config import TTCDConfig
from ttmem.fast_weights.install import install
from ttmem.fast_weights.modeling import TTCDForCausalLM, TTCDModel
from ttmem.fast_weights.reading import Reader, Reading, load_reader
from ttmem.fast_weights.state import FastWeightCache
from ttmem.fast_weights.state_file import load_state, save_state
from ttmem.fast_weights.state_size import state_bytes

AutoConfig.register("ttcd", TTCDConfig, exist_ok=True)
AutoModel.register(TTCDConfig, TTCDModel, exist_ok=True)
AutoModelForCausalLM.register(TTCDConfig, TTCDForCausalLM, exist_ok=True)

__all__ = [
    "FastWeightCache",
    "Reader",
    "Reading",
    "TTCDConfig",
    "TTCDForCausalLM",
    "TTCDModel",
    "install",
    "load_reader",
    "load_state",
    "save_state",
    "state_bytes",
]
