"""The state of decoders that keep plain tensors."""

from __future__ import annotations

import torch

from transduce.nn.state import RowState


def test_rows_and_sentences_follow_a_search() -> None:
    numbers = torch.arange(3)[:, None]
    state = RowState({"hidden": numbers.repeat_interleave(2, 0) * 10}, {"memory": numbers}, n_beams=2)
    assert (state.n_rows, state.n_beams) == (6, 2)
    state.rows["hidden"] += torch.tensor([0, 1, 0, 1, 0, 1])[:, None]
    state.reorder(torch.tensor([1, 1, 3, 2, 4, 4]))
    assert state.rows["hidden"].flatten().tolist() == [1, 1, 11, 10, 20, 20]
    state.select(torch.tensor([2, 0]))
    assert state.rows["hidden"].flatten().tolist() == [20, 20, 1, 1]
    assert state.sentences["memory"].flatten().tolist() == [2, 0] and state.n_rows == 4


def test_changes_copy_what_another_state_may_share() -> None:
    hidden = torch.arange(4.0)[:, None]
    state = RowState({"hidden": hidden}, n_beams=2)
    state.reorder(torch.tensor([1, 0, 2, 2]))
    assert hidden.flatten().tolist() == [0, 1, 2, 3]
