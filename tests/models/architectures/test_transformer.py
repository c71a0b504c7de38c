"""Looking tokens up in what is still in its file, and in what has left it."""

import pytest
import torch

from app.models.architectures.transformer import TokenEmbedding

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IDS = torch.tensor([3, 0, 3, 6])


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("wanted", DTYPES)
@pytest.mark.parametrize("stays_mapped", [False, True])
def test_finishing_the_loading_changes_no_row(
    stored: torch.dtype, wanted: torch.dtype, stays_mapped: bool
) -> None:
    rows = torch.randn(7, 5).to(stored)
    table = TokenEmbedding(rows, wanted, stays_mapped=stays_mapped)
    before = table(IDS)
    table.finish_loading()
    assert before.dtype is wanted
    assert torch.equal(before, rows[IDS].to(wanted))
    assert torch.equal(table(IDS), before)


@pytest.mark.parametrize("stays_mapped", [False, True])
def test_only_what_stays_goes_on_reading_its_file(stays_mapped: bool) -> None:
    rows = torch.ones(7, 5)
    table = TokenEmbedding(rows, torch.float32, stays_mapped=stays_mapped)
    table.finish_loading()
    table.finish_loading()
    rows.zero_()
    assert bool(table(IDS).any()) is not stays_mapped


def test_a_copy_leaves_the_file_also_where_nothing_is_rounded() -> None:
    rows = torch.ones(7, 5)
    copied = TokenEmbedding(rows, torch.float32, stays_mapped=True).copied_to(torch.bfloat16)
    copied.finish_loading()
    rows.zero_()
    assert copied(IDS).dtype is torch.bfloat16
    assert copied(IDS).all()
