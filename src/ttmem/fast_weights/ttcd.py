"""The layer of In-Place Test-Time Context Distillation, and its memory in the down-projection.

Symbols as in the paper: Z the features before the down-projection, T the teacher (long window), S the student (short
window), Zbar after the convolutions, R the residual that is written, K the key it is written at, C the chunk size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize, pad, sigmoid

from ttmem.fast_weights.attention import Context
from ttmem.fast_weights.config import TTCDConfig
from ttmem.fast_weights.convolution import chunk_convolution, uniform_convolution
from ttmem.fast_weights.layout import Layout
from ttmem.fast_weights.scan import Plan, make_plan, scan_memory, scan_state
from ttmem.fast_weights.state import LayerState
from ttmem.fast_weights.window import WindowLayer

EPS = 1e-6


class FastWeights(nn.Module):
    """What TTCD adds to a layer: two convolutions [taps, f], P [d, d] and b [d]; each is left out where set so."""

    def __init__(self, config: TTCDConfig) -> None:
        super().__init__()
        d, f, taps = config.hidden_size, config.intermediate_size, config.conv_kernel
        self.start, self.std = config.convolution_start, config.initializer_range
        self.conv_teacher = nn.Parameter(torch.empty(taps, f)) if taps else None
        self.conv_student = nn.Parameter(torch.empty(taps, f)) if taps else None
        self.projection = nn.Parameter(torch.empty(d, d)) if config.projection else None
        self.rate = nn.Parameter(torch.empty(d)) if config.token_rates else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """P is the identity and b zero. From scratch conv_T is zero and conv_S random; in a pretrained model conv_T
        copies and conv_S is zero, so K = 0 and nothing is written before training."""
        if self.conv_teacher is not None and self.conv_student is not None:
            nn.init.zeros_(self.conv_teacher)
            if self.start == "scratch":
                nn.init.normal_(self.conv_student, std=self.conv_student.shape[0] ** -0.5)
            else:
                nn.init.ones_(self.conv_teacher[0])
                nn.init.zeros_(self.conv_student)
        if self.projection is not None:
            nn.init.eye_(self.projection)
        if self.rate is not None:
            nn.init.zeros_(self.rate)


class TTCDLayer(WindowLayer):
    """A decoder layer that runs its attention with two windows and writes their difference into its down-projection.

    W_i = W_down + eta sum_(j < i) sum_(t in C_j) beta_t R_t K_t',  R = P W_down (Zbar_T - Zbar_S),  K = l2norm(Zbar_S)
    output: W_i Zbar_T, or W_i Z_T                                                        (sec. 3.3, eq. 10 to 13)

    R and Z are those of W_down, whatever was written ("off-policy"), so all chunks are computed at once.
    """

    def __init__(self, config: TTCDConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.fast = FastWeights(config)

    def forward(self, hidden: Tensor, context: Context, state: LayerState | None = None) -> Tensor:
        """hidden [B, T, d] -> [B, T, d]."""
        layout, C = context.layout, self.config.chunk_size
        attention_T, attention_S = self.self_attn.dual(
            self.input_layernorm(hidden), self.config.student_window, context, state
        )
        hidden_T, hidden_S = hidden + attention_T, hidden + attention_S
        h_T, h_S = self.post_attention_layernorm(hidden_T), self.post_attention_layernorm(hidden_S)
        Z_T, Z_S = self.mlp.features(h_T), self.mlp.features(h_S)
        place = layout.places() % C
        Zbar_T = self._convolve(Z_T, self.fast.conv_teacher, place, layout, state, "tail_teacher")
        Zbar_S = self._convolve(Z_S, self.fast.conv_student, place, layout, state, "tail_student")
        read = Zbar_T if self.config.convolved_reads else Z_T
        K, V = self._writes(Zbar_T, Zbar_S, h_S)
        memory = read_memory(read, K, V, context, state, self.config)
        out = self.mlp.down_proj(read)
        return hidden_T + (out if memory is None else out + memory)

    def _convolve(
        self, Z: Tensor, kernel: Tensor | None, place: Tensor, layout: Layout, state: LayerState | None, name: str
    ) -> Tensor:
        """Zbar: Z behind the tail that the state kept of it, convolved within each chunk."""
        if kernel is None:
            return Z
        if state is None and layout.first is None:
            return uniform_convolution(Z, kernel.to(Z.dtype), self.config.chunk_size)
        stream = Z if state is None else state.behind(name, Z)
        if state is not None:
            state.set(**{name: layout.keep_last(stream, kernel.shape[0] - 1)})
        tail = stream.shape[1] - Z.shape[1]
        return chunk_convolution(stream, kernel.to(Z.dtype), pad(place, (tail, 0)))[:, tail:]

    def _writes(self, Zbar_T: Tensor, Zbar_S: Tensor, h_S: Tensor) -> tuple[Tensor, Tensor]:
        """K [B, T, f] and eta beta R [B, T, d]. Biases of the down-projection cancel in the difference."""
        W, fast = self.mlp.down_proj.weight, self.fast
        if self.config.stop_gradient:
            R = linear(Zbar_T, W).detach() - linear(Zbar_S, W)
        else:
            R = linear(Zbar_T - Zbar_S, W)
        if fast.projection is not None:
            R = linear(R, fast.projection)
        beta = sigmoid(h_S @ fast.rate).unsqueeze(-1) if fast.rate is not None else 1.0
        K = normalize(Zbar_S, dim=-1, eps=EPS) if self.config.normalize_keys else Zbar_S
        return K, self.config.fast_lr * beta * R


def read_memory(
    z: Tensor,
    keys: Tensor,
    values: Tensor,
    context: Context,
    state: LayerState | None,
    config: TTCDConfig,
    prepare: Callable[[Tensor, Layout], Tensor] = lambda values, layout: values,
) -> Tensor | None:
    """What tokens read of the chunks before theirs, [B, T, d], from z, keys [B, T, f] and values [B, T, d].

    The state keeps keys and values of the unfinished chunk, and the sum of what finished chunks wrote. `prepare` makes
    values of what is kept, once a chunk is complete. None: nothing can have been written yet.
    """
    layout, C = context.layout, config.chunk_size
    if state is None:
        return scan_memory(z, keys, prepare(values, layout), _plan(context, config, 0))
    read: Tensor | None
    keys, values = state.behind("pending_keys", keys), state.behind("pending_values", values)
    memory, held = state.get("memory"), keys.shape[1] - layout.tokens
    counts = layout.next_counts()
    if context.completes:
        plan = _plan(context, config, held)
        end = (layout.tokens if layout.lengths is None else layout.lengths) - counts % C
        read, memory = scan_state(z, keys, prepare(values, layout), plan, memory, end)
    else:  # every token is in the chunk that the state left unfinished
        read = None if memory is None else z @ memory.to(z.dtype).mT
    many = counts % C if isinstance(counts, int) else C - 1
    state.set(
        pending_keys=layout.keep_last(keys, many), pending_values=layout.keep_last(values, many), memory=memory
    )
    return read


def _plan(context: Context, config: TTCDConfig, held: int) -> Plan:
    """The plan of this forward, the same for all its layers."""
    name = f"plan {held}"
    if name not in context.shared:
        context.shared[name] = make_plan(
            context.layout,
            config.chunk_size,
            held,
            config.hidden_size,
            config.intermediate_size,
            inclusive=config.scan == "inclusive",
        )
    return context.shared[name]
