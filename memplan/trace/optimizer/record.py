"""Record what an optimizer's `step()` does: its own code runs once, on fake tensors, and its ops are written down.

The optimizer itself, its parameters and its state are not touched: a copy of it (`fake_copy.py`) has fake parameters,
gradients and state, and recorded numbers (`numbers.py`) for its options; a tape (`update_tape.py`) takes its ops. What
the recording depends on (the structure of the state, options that are no numbers, answers of comparisons) is stored,
and `runtime/execute/recorded_state.py` compares it before each step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree

from memplan.errors import UnsupportedGraph
from memplan.trace.optimizer.fake_copy import FakeCopy
from memplan.trace.optimizer.intercept import recorded
from memplan.trace.optimizer.numbers import Numeral, Untraceable, items_of, source_of
from memplan.trace.optimizer.recordable import explained, require_apart, require_no_closure
from memplan.trace.optimizer.recorded_update import (
    At,
    RecordedUpdate,
    UpdateInput,
    UpdateOp,
    options_of,
    structure_of,
)
from memplan.trace.optimizer.state_changes import StateChanges, settings_written
from memplan.trace.optimizer.surroundings import Surroundings, attributes_of, has_own_step, random_numbers_kept
from memplan.trace.optimizer.update_tape import UpdateTape
from memplan.trace.passes.rewrite import storage_key


def record_update(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], with_gradient: Collection[str]
) -> RecordedUpdate:
    """Return what the next `optimizer.step()` does.

    Args:
        optimizer: It stays as it is.
        names: The names of its parameters, by `id`.
        with_gradient: The names of the parameters that have gradients.

    Raises:
        Untraceable: The update depends on something that a program cannot follow.
        UnsupportedGraph: `step()` cannot run without a closure, or raises an error.
    """
    require_no_closure(optimizer)
    if has_own_step(optimizer):
        raise Untraceable("its step was replaced on this optimizer")
    require_apart(optimizer)
    attributes, surroundings, tape = attributes_of(optimizer), Surroundings(optimizer), UpdateTape()
    copied = FakeCopy(optimizer, names, with_gradient, tape)
    _run(copied, tape, surroundings)
    if attributes_of(copied.made) != attributes:
        raise Untraceable("it changes attributes of its own")
    return _result(copied, tape, attributes, surroundings)


def _run(copied: FakeCopy, tape: UpdateTape, surroundings: Surroundings) -> None:
    """Run `step()` on a copy. Raises `Untraceable` if it changes something that a program could not."""
    made = copied.made
    start = {i: storage_key(p) for i, p in copied.fakes.items()}
    try:
        with random_numbers_kept(), torch.inference_mode(False), torch.enable_grad(), recorded(type(made), tape):
            type(made).step(made)
    except (Untraceable, UnsupportedGraph):
        raise
    except Exception as error:
        raise explained(copied.own, error) from error
    finally:
        changed = surroundings.changed()
        surroundings.restore()
    if changed is not None:
        raise Untraceable(f"it changes {changed}")
    if any(storage_key(p) != start[i] for i, p in copied.fakes.items() if i in copied.names):
        raise Untraceable("it replaces the memory of a parameter (p.data = ...)")


def _result(
    copied: FakeCopy, tape: UpdateTape, attributes: Mapping[str, Any], surroundings: Surroundings
) -> RecordedUpdate:
    """Return the recording, after checking what has become of the copy's state and options."""
    after, structure = StateChanges(tape), {}
    for p in copied.parameters:
        name, old, new = copied.names.get(id(p)), copied.state[id(p)], copied.made.state.get(copied.fakes[id(p)], {})
        if name in copied.with_gradient and name is not None:
            structure[name] = structure_of(copied.own.state.get(p, {}))
            after.look_at(name, old, new)
        elif list(old.items()) != list(new.items()):
            raise Untraceable("it changes the state of a parameter without a gradient")
    parameters = [storage_key(copied.fakes[id(p)]) for p in copied.parameters]
    states = copied.made.state.values()
    kept = [storage_key(x) for state in states for x in state.values() if isinstance(x, torch.Tensor)]
    if len({*parameters, *kept}) < len({*parameters}) + len(kept):
        raise Untraceable("two tensors of its state have memory in common")
    settings = settings_written(copied)
    for expression in [one for *_, one in (*after.numbers, *settings)]:
        if not all(item in tape.known_steps for item in items_of(expression)):
            raise Untraceable("a Python number of its state depends on gradients")
    ops, read_from = tape.program(after.initial.values(), after.results)
    inputs = dict(tape.inputs)
    for (name, key), op in after.initial.items():
        inputs[op.results[0]] = UpdateInput(kind="state", name=name, key=key)
    return RecordedUpdate(
        names=tuple(structure),
        inputs=inputs,
        layouts={i: _layout(t) for i, t in enumerate(tape.tensors)},
        devices={i: t.device for i, t in enumerate(tape.tensors)},
        ops=ops,
        initial=after.initial,
        created=after.created,
        replaced=tuple(after.replaced),
        numbers=tuple(after.numbers),
        settings=tuple(settings),
        keys=after.keys,
        read_from=read_from,
        conditions=dict(tape.conditions.found),
        known_steps=tuple(tape.known_steps),
        structure=structure,
        options=options_of(copied.own),
        attributes=attributes,
        surroundings=surroundings,
        signature=_signature(inputs, ops, read_from, after.created, after.replaced),
    )


def _signature(
    inputs: Mapping[int, UpdateInput],
    ops: tuple[UpdateOp, ...],
    read_from: Mapping[int, int],
    created: Mapping[tuple[str, str], int],
    replaced: Iterable[tuple[int, int]],
) -> str:
    """Return a text that is equal for updates with the same ops on the same tensors, however values are numbered."""
    label: dict[int, Any] = {value: (one.kind, one.name, one.key) for value, one in inputs.items()}

    def named(leaf: Any) -> Any:
        if isinstance(leaf, At):
            return ("tensor", label[leaf.value])
        if isinstance(leaf, Numeral):
            return source_of(leaf.expression, lambda item: f"item({label[read_from[item.number]]})")
        return ("plain", leaf)

    lines = []
    for op in ops:
        leaves, spec = pytree.tree_flatten((op.args, op.kwargs))
        lines.append((str(op.target), list(map(named, leaves)), str(spec)))
        for value in op.results:
            label.setdefault(value, len(lines))
    ends = [(name, key, label[value]) for (name, key), value in created.items()]
    return repr((lines, ends, [(label[one], label[two]) for one, two in replaced]))


def _layout(tensor: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor on the device "meta" with the layout of `tensor`."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
