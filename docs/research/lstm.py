"""A small LSTM of our own for the comparison of forecasts. Must not know loads, traces or nodes.

Hochreiter and Schmidhuber, "Long Short-Term Memory", Neural Computation 9(8), 1997, with the forget
gate of Gers et al., 2000; taught by backpropagation through time and Adam (Kingma and Ba, ICLR'15).
Nothing that ships uses it. It is numpy alone and float64, so that a test can hold its gradients
against finite differences; chance comes in as a generator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

Loss = Callable[[Array], tuple[Array, Array]]
"""Of errors (wanted less said): each one's loss, and how that changes with what is said."""

GATES = 4
"""Input, forget, candidate and output, side by side in every matrix."""

RATE, DECAY, DECAY_OF_SQUARES, TINY = 2e-3, 0.9, 0.999, 1e-8
"""Adam's step size, and its two averages as in its paper."""

NORM_MOST = 1.0
"""Gradients are shortened to this length: recurrent nets have cliffs."""


def squared(errors: Array) -> tuple[Array, Array]:
    """The loss of a mean: what Lyra trains with (EuroSys'23, section 6)."""
    return errors * errors, -2.0 * errors


def pinball(q: float) -> Loss:
    """The loss of quantile `q` (Koenker and Bassett, Econometrica 46(1), 1978)."""

    def loss(errors: Array) -> tuple[Array, Array]:
        return np.maximum(q * errors, (q - 1.0) * errors), np.where(errors > 0.0, -q, 1.0 - q)

    return loss


class Layer(NamedTuple):
    """into: of the inputs (inputs x 4 cells). back: of the last outputs (cells x 4 cells)."""

    into: Array
    back: Array
    bias: Array


class Weights(NamedTuple):
    """Of a net: its layers from below, and what makes its outputs of the last one's cells."""

    layers: tuple[Layer, ...]
    out: Array
    bias: Array

    def arrays(self) -> list[Array]:
        """All of them, in one order; shared, not copied."""
        return [*(array for layer in self.layers for array in layer), self.out, self.bias]


class _Seen(NamedTuple):
    """What a layer did, instant by instant along the first axis; the way back needs all of it."""

    inputs: Array
    gates: Array
    states: Array
    outputs: Array


def made(
    inputs: int, cells: int, layers: int, outputs: int, chance: np.random.Generator
) -> Weights:
    """Weights before any learning: even over +-1/sqrt(cells), and gates that forget nothing."""
    reach = 1.0 / np.sqrt(cells)
    found: list[Layer] = []
    for place in range(layers):
        bias = np.zeros(GATES * cells)
        bias[cells : 2 * cells] = 1.0
        found.append(
            Layer(
                into=chance.uniform(-reach, reach, (cells if place else inputs, GATES * cells)),
                back=chance.uniform(-reach, reach, (cells, GATES * cells)),
                bias=bias,
            )
        )
    out = chance.uniform(-reach, reach, (cells, outputs))
    return Weights(layers=tuple(found), out=out, bias=np.zeros(outputs))


def said(weights: Weights, windows: Array) -> Array:
    """What the net says after each window.

    Args:
        windows: windows x instants x inputs.

    Returns:
        windows x outputs.
    """
    found: Array = _forward(weights, windows)[-1].outputs[-1] @ weights.out + weights.bias
    return found


def gradients(
    weights: Weights, windows: Array, wanted: Array, loss: Loss
) -> tuple[float, list[Array]]:
    """Mean loss over what is wanted, and how it changes with each weight.

    Args:
        wanted: windows x outputs; NaN where it is not known, and nothing is to be learned.

    Returns:
        The loss, and one array per array of the weights, in their order.
    """
    seen = _forward(weights, windows)
    last = seen[-1].outputs[-1]
    is_known = ~np.isnan(wanted)
    count = max(1, int(is_known.sum()))
    errors = np.where(is_known, wanted - (last @ weights.out + weights.bias), 0.0)
    losses, slopes = loss(errors)
    slopes = np.where(is_known, slopes, 0.0) / count
    found: list[Array] = [last.T @ slopes, slopes.sum(axis=0)]
    above = np.zeros_like(seen[-1].outputs)
    above[-1] = slopes @ weights.out.T
    for layer, did in zip(reversed(weights.layers), reversed(seen), strict=True):
        own, above = _backward(layer, did, above)
        found[:0] = own
    return float(losses[is_known].sum()) / count, found


def _forward(weights: Weights, windows: Array) -> list[_Seen]:
    below = np.ascontiguousarray(windows.transpose(1, 0, 2))
    found: list[_Seen] = []
    for layer in weights.layers:
        found.append(_layer_forward(layer, below))
        below = found[-1].outputs
    return found


def _layer_forward(layer: Layer, inputs: Array) -> _Seen:
    instants, windows, _ = inputs.shape
    cells = layer.back.shape[0]
    gates = inputs @ layer.into + layer.bias
    states, outputs = np.zeros((instants, windows, cells)), np.zeros((instants, windows, cells))
    state = output = np.zeros((windows, cells))
    for at in range(instants):
        now = gates[at]
        now += output @ layer.back
        candidate = np.tanh(now[:, 2 * cells : 3 * cells])
        now[:] = 0.5 * np.tanh(0.5 * now) + 0.5  # the logistic function, without overflow
        now[:, 2 * cells : 3 * cells] = candidate
        enter, keep, _, leave = np.split(now, GATES, axis=1)
        states[at] = state = keep * state + enter * candidate
        outputs[at] = output = leave * np.tanh(state)
    return _Seen(inputs=inputs, gates=gates, states=states, outputs=outputs)


def _backward(layer: Layer, did: _Seen, above: Array) -> tuple[list[Array], Array]:
    """Slopes of a layer's weights, and of its inputs, from those of its outputs."""
    instants, windows, cells = did.outputs.shape
    slopes = np.empty_like(did.gates)
    of_output, of_state = np.zeros((windows, cells)), np.zeros((windows, cells))
    nothing = np.zeros((windows, cells))
    for at in reversed(range(instants)):
        enter, keep, candidate, leave = np.split(did.gates[at], GATES, axis=1)
        bent = np.tanh(did.states[at])
        of_output = of_output + above[at]
        of_state = of_state + of_output * leave * (1.0 - bent * bent)
        before = did.states[at - 1] if at else nothing
        slopes[at] = np.concatenate(
            (
                of_state * candidate * enter * (1.0 - enter),
                of_state * before * keep * (1.0 - keep),
                of_state * enter * (1.0 - candidate * candidate),
                of_output * bent * leave * (1.0 - leave),
            ),
            axis=1,
        )
        of_state = of_state * keep
        of_output = slopes[at] @ layer.back.T
    last = np.concatenate((nothing[None], did.outputs[:-1]))
    own = [
        np.tensordot(did.inputs, slopes, axes=((0, 1), (0, 1))),
        np.tensordot(last, slopes, axes=((0, 1), (0, 1))),
        slopes.sum(axis=(0, 1)),
    ]
    return own, slopes @ layer.into.T


class Adam:
    """Changes weights in place, a little against each gradient that it is given."""

    def __init__(self, weights: Weights) -> None:
        self._arrays = weights.arrays()
        self._means = [np.zeros_like(array) for array in self._arrays]
        self._squares = [np.zeros_like(array) for array in self._arrays]
        self._steps = 0

    def step(self, found: list[Array], rate: float = RATE) -> None:
        """One step against the gradients, given in the order of the weights' arrays."""
        self._steps += 1
        norm = float(np.sqrt(sum(float((each * each).sum()) for each in found)))
        shorter = min(1.0, NORM_MOST / max(norm, TINY))
        of_mean, of_square = 1.0 - DECAY**self._steps, 1.0 - DECAY_OF_SQUARES**self._steps
        for array, mean, square, each in zip(
            self._arrays, self._means, self._squares, found, strict=True
        ):
            slope = each * shorter
            mean += (1.0 - DECAY) * (slope - mean)
            square += (1.0 - DECAY_OF_SQUARES) * (slope * slope - square)
            array -= rate * (mean / of_mean) / (np.sqrt(square / of_square) + TINY)
