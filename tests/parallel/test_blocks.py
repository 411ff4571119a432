import pytest

from parallel import BlockSettings, LayerSize


def test_block_sizes_are_chosen_or_fixed():
    size = LayerSize(width=128, heads=1, feed_forward=512)
    shape = {"batch": 1, "sequence": 16384, "element_bytes": 4}
    chosen = BlockSettings().sizes(size, **shape)
    assert min(chosen.query, chosen.key) >= 768  # below it PyTorch's kernel takes smaller tiles
    assert BlockSettings(key=3).sizes(size, **shape) == type(chosen)(
        query=chosen.query, key=3, rows=chosen.rows
    )
    wide = LayerSize(width=1024, heads=8, feed_forward=4096)
    assert BlockSettings().sizes(wide, **shape).rows < chosen.rows
    short = BlockSettings().sizes(size, batch=1, sequence=5, element_bytes=4)
    assert (short.query, short.key, short.rows) == (5, 5, 5)
    with pytest.raises(ValueError, match="block_rows: got 0, expected a positive integer"):
        BlockSettings(rows=0)
