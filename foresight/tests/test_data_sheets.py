"""Presets of which only data sheets are known."""

import pytest

import wholestep as ws
from tests.unit.test_hardware import GIB, check_sheet

ISSUED = {  # as in tests/unit/test_hardware.py
    "dgx-a100-40gb": (312, 1555, 40, 108), "a100-pcie-40gb": (312, 1555, 40, 108),
    "a100-pcie-80gb": (312, 1935, 80, 108), "h100-pcie": (756.5, 2000, 80, 114),
    "b200": (2250, 8000, 192, 148), "gb200-nvl72": (2500, 8000, 186, 148),
    "mi300x": (1307.4, 5300, 192, 304), "l40s": (362.05, 864, 48, 142), "v100-16gb": (125, 900, 16, 80),
    "v100-32gb": (125, 900, 32, 80), "v100-pcie": (112, 900, 16, 80), "p5": (989, 3350, 80, 132),
}  # fmt: skip


@pytest.mark.parametrize("name", ISSUED)
def test_numbers_of_data_sheets(name: str) -> None:
    check_sheet(ws.Hardware.preset(name), *ISSUED[name])


@pytest.mark.parametrize(("ranks", "gb_per_s"), [(2, 47.7), (8, 312.9)])
def test_all_reduces_of_mi300x(ranks: int, gb_per_s: float) -> None:
    """Published bus bandwidths of all-reduces of 4 GiB (stas00/ml-engineering, network), to which no curve was fitted:
    a pair has a seventh of the links.
    """
    us = ws.Hardware.preset("mi300x").group_us("all_reduce", 8 * GIB, ranks)
    assert 2 * (ranks - 1) / ranks * 8 * GIB / us / 1e3 == pytest.approx(gb_per_s, rel=0.1)


def test_what_was_not_measured_says_so() -> None:
    fitted = {"dgx-a100", "dgx-h100", "h200", "b200-nvl72", "h100-96gb-500w", "a3-mega", "p5", "b200", "loopback"}
    for name in {*ws.Hardware.presets()} - fitted:
        assert any(text.startswith("assumed, not measured") for text in ws.Hardware.preset(name).sources), name


def test_a_pair_on_a_board_without_a_switch_has_a_third_of_the_links() -> None:
    board, switched = ws.Hardware.preset("hgx-h200-4"), ws.Hardware.preset("h200")
    two, four = (board.group_us("all_gather", GIB, ranks) for ranks in (2, 4))
    assert two > 1.8 * switched.group_us("all_gather", GIB, 2)
    assert four == pytest.approx(switched.group_us("all_gather", GIB, 4), rel=0.01)
    assert board.group_us("all_gather", GIB, 8) > four
    assert ws.Hardware.preset("h200").levels[0].rate(2) == ws.Hardware.preset("h200").levels[0].bytes_per_us


def test_v100_has_no_fast_bfloat16() -> None:
    v100 = ws.Hardware.preset("v100-32gb")
    assert v100.matmul_us(1, 4096, 4096, 4096, "bfloat16") > 4 * v100.matmul_us(1, 4096, 4096, 4096, "float16")
