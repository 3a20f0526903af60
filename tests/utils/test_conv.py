"""Tests of dbrdist.utils.conv."""

from dbrdist import utils


def windows(size, k, s, p, d):
    """Where each window starts, by trying."""
    return [at for at in range(-p, size + p, s) if at + d * (k - 1) < size + p]


def test_sizes_of_convolutions():
    for size in range(1, 9):
        for k, s, p, d in [(k, s, p, d) for k in (1, 2, 3) for s in (1, 2, 3) for p in (0, 1) for d in (1, 2)]:
            if size + 2 * p < d * (k - 1) + 1:
                continue
            starts = windows(size, k, s, p, d)
            assert utils.get_conv_outsize(size, k, s, p, d=d) == len(starts), (size, k, s, p, d)
            end = starts[-1] + d * (k - 1) + 1  # with cover_all a further window starts where some is left over
            assert utils.get_conv_outsize(size, k, s, p, True, d) == len(starts) + (end < size + p)
            back = utils.get_deconv_outsize(len(starts), k, s, p, d=d)
            assert utils.get_conv_outsize(back, k, s, p, d=d) == len(starts) and back <= size
            if s <= k:
                back = utils.get_deconv_outsize(len(starts), k, s, p, True, d)
                assert utils.get_conv_outsize(back, k, s, p, True, d) == len(starts)
