"""Smaller copies as shards, and the look at all images."""

from __future__ import annotations

import io
import tarfile
import types

import numpy as np
import pytest

from dbrdist.datasets import ImageFolder, open_images
from dbrdist.datasets.image import images, shards
from dbrdist.datasets.image.shards import check_images, prepare_shards, shrunk
from dbrdist.errors import DatasetError
from dbrdist.iterators import SerialIterator
from tests.datasets.image_files import class_folders, jpeg

Pillow = pytest.importorskip("PIL.Image", reason="needs Pillow to compare with")


@pytest.fixture
def root(tmp_path):
    """Two classes of small images, two large ones, a PNG, a damaged file, and names that differ in dots alone."""
    class_folders(tmp_path / "images")
    (tmp_path / "images" / "ant" / "large.jpg").write_bytes(jpeg(50, 130, 90))
    (tmp_path / "images" / "bee" / "wide.JPEG").write_bytes(jpeg(51, 70, 200))
    (tmp_path / "images" / "bee" / "broken.jpg").write_bytes(jpeg(52)[:-20])
    for name in ("a.b.jpg", "a-b.jpg"):
        (tmp_path / "images" / "bee" / name).write_bytes(jpeg(len(name)))
    Pillow.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "images" / "ant" / "p.png")
    return tmp_path / "images"


def names_in(shard):
    with tarfile.open(shard) as file:
        return file.getnames()


@pytest.mark.parametrize("num_threads", [1, 3])
def test_all_images_are_looked_at(root, num_threads):
    calls = []
    found = check_images(open_images(root), num_threads, lambda done, total: calls.append((done, total)))
    assert found.num_good == 10
    assert len(found.bad) == 1 and "bee/broken.jpg: the JPEG is cut short" in found.bad[0]
    assert calls == [(k, 11) for k in range(1, 12)]


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("shard_bytes", [1, 3000, 1 << 20])
def test_shards_hold_the_same_images_in_the_same_order(root, tmp_path, num_threads, shard_bytes):
    before = open_images(root)
    found = prepare_shards(before, tmp_path / "out", size=60, shard_bytes=shard_bytes, num_threads=num_threads)
    assert found.num_good == 10 and "broken.jpg" in found.bad[0]
    after = open_images(tmp_path / "out")
    sizes = [shard.size for shard in after.shards]
    assert len(sizes) == 10 if shard_bytes == 1 else all(s > shard_bytes for s in sizes[:-1])
    kept = [i for i in range(len(before)) if "broken" not in before.name(i)]
    assert after.classes == before.classes and after.labels.tolist() == before.labels[kept].tolist()
    for i, j in enumerate(kept):
        image = images.decode(before.read(j))
        if min(image.shape[:2]) <= 60:
            assert after.read(i) == before.read(j)
        else:
            smaller = images.decode(after.read(i))
            assert min(smaller.shape[:2]) == 60
            assert abs(smaller.shape[1] / smaller.shape[0] - image.shape[1] / image.shape[0]) < 0.02
            expected = Pillow.fromarray(image).resize(smaller.shape[1::-1], Pillow.Resampling.BOX)
            assert np.abs(smaller.astype(int) - np.asarray(expected)).mean() < 3  # of 255: what JPEG loses
    names = [name for shard in sorted((tmp_path / "out").glob("*.tar")) for name in names_in(shard)]
    assert len(names) == len(set(names)) == 20
    keys = [name.rpartition("/")[2].partition(".")[0] for name in names]
    assert keys[::2] == keys[1::2]


def test_the_same_call_makes_the_same_bytes(root, tmp_path):
    for out, num_threads in (("a", 1), ("b", 3)):
        prepare_shards(open_images(root), tmp_path / out, size=60, shard_bytes=3000, num_threads=num_threads)
    for shard in (tmp_path / "a").glob("*.tar"):
        assert shard.read_bytes() == (tmp_path / "b" / shard.name).read_bytes()


def test_copies_train_as_the_folder_does(root, tmp_path):
    prepare_shards(open_images(root), tmp_path / "out", size=1000)
    (root / "bee" / "broken.jpg").unlink()
    folder, copies = (SerialIterator(ImageFolder(r), 2, seed=7) for r in (root, tmp_path / "out"))
    for _ in range(9):
        for (x, t), (y, u) in zip(folder.next(), copies.next(), strict=True):
            assert np.array_equal(x, y) and t == u


def test_an_image_that_is_small_stays_as_it_is():
    assert shrunk(jpeg(1), 24, 90) == jpeg(1)
    assert images.decode(shrunk(jpeg(1), 12, 90)).shape == (12, 16, 3)


def test_an_image_that_would_be_too_long_for_a_jpeg_stays_as_it_is():
    for width, becomes in ((131_000, 65_500), (131_002, 131_002)):
        file = io.BytesIO()
        Pillow.new("L", (width, 4)).save(file, "png")
        assert images.decode(shrunk(file.getvalue(), 2, 90)).shape[1] == becomes


@pytest.mark.parametrize("decoder", ["simplejpeg", "opencv", "pillow"])
def test_every_encoder_writes_what_pillow_reads(monkeypatch, decoder):
    monkeypatch.setattr(images, "decoder", lambda: decoder)
    ramp = np.stack(np.broadcast_arrays(*np.ogrid[0:256:4, 0:256:2], np.uint8(99)), -1).astype(np.uint8)
    data = images.encode_jpeg(ramp[:, ::-1], 95)
    found = np.asarray(Pillow.open(io.BytesIO(data)))
    assert np.abs(found.astype(int) - ramp[:, ::-1]).mean() < 3
    assert len(images.encode_jpeg(ramp, 20)) < len(data)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": 0}, "expected size from 1 to 65,536, got 0"),
        ({"quality": 101}, "expected quality from 1 to 100, got 101"),
        ({"shard_bytes": 0}, "expected shard_bytes from 1"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_written(root, tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        prepare_shards(open_images(root), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_folder_with_files_is_refused(root):
    with pytest.raises(FileExistsError, match=r"an empty folder for the shards, but .*images has files in it"):
        prepare_shards(open_images(root), root)


def test_what_stops_leaves_no_half_shard_and_no_index(root, tmp_path):
    def stop(done, total):
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_shards(open_images(root), tmp_path / "out", size=60, shard_bytes=3000, progress=stop)
    left = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert len(left) > 1 and left == [".unfinished", *(f"images-{k:06d}.tar" for k in range(len(left) - 1))]


def test_no_good_image_leaves_no_index(tmp_path):
    (tmp_path / "in" / "a").mkdir(parents=True)
    (tmp_path / "in" / "a" / "x.jpg").write_bytes(b"no image")
    found = prepare_shards(open_images(tmp_path / "in"), tmp_path / "out")
    assert found.num_good == 0 and list((tmp_path / "out").iterdir()) == []


def test_images_of_a_class_have_different_names_in_its_shards(tmp_path):
    names = ["a.jpg", "a.png", "b.c.jpg", "b-c.jpg", "deep/a.jpg", "a.jpg"]
    index = types.SimpleNamespace(labels=[0, 0, 0, 0, 0, 1], classes=["ant", "bee"], name=names.__getitem__)
    made = shards._Shards(index, str(tmp_path), 1)
    assert [made._key(i) for i in range(6)] == [b"ant/a", b"ant/a-1", b"ant/b-c", b"ant/b-c-3", b"ant/a-4", b"bee/a"]
    assert made._keys == {b"bee/a"}  # not those of all classes, which may be many


@pytest.mark.parametrize("after", [1, 4, 9])
def test_shards_that_are_not_all_there_are_not_taken_for_all(root, tmp_path, after):
    """Ctrl-C, a full disk or a kill: what is there already are whole shards of some of the images."""

    def interrupt(done, total):
        if done == after:
            raise KeyboardInterrupt

    index, out = open_images(root), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        prepare_shards(index, out, size=60, shard_bytes=1, progress=interrupt)
    with pytest.raises(DatasetError, match="out: expected all of its shards, but dbrdist-data prepare did not come to"):
        open_images(out)
    prepare_shards(index, out, size=60, shard_bytes=1)
    assert len(open_images(out)) == 10 and not (out / ".unfinished").exists()
    with pytest.raises(FileExistsError, match="expected an empty folder"):
        prepare_shards(index, out)


def test_two_starts_at_once_do_not_meet(root, tmp_path):
    """As `mpiexec -n 2 dbrdist-data prepare` makes them."""
    index, out, refused = open_images(root), tmp_path / "out", []

    def meanwhile(done, total):
        if not refused:
            with pytest.raises(FileExistsError, match="another dbrdist-data prepare writes to it") as error:
                prepare_shards(index, out, size=60)
            refused.append(error)

    prepare_shards(index, out, size=60, shard_bytes=3000, progress=meanwhile)
    assert refused and len(open_images(out)) == 10


def test_half_an_index_is_no_file_of_others(root, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    for name in (".unfinished", "dbrdist.index.tmp-7-8"):
        (out / name).touch()
    prepare_shards(open_images(root), out, size=60)
    assert sorted(path.name for path in out.iterdir()) == ["dbrdist.index", "images-000000.tar"]


def test_files_of_others_in_an_unfinished_folder_are_left_alone(root, tmp_path):
    (tmp_path / "out").mkdir()
    for name in (".unfinished", "images-000000.tar", "mine.tar"):
        (tmp_path / "out" / name).touch()
    with pytest.raises(FileExistsError, match="expected an empty folder"):
        prepare_shards(open_images(root), tmp_path / "out")
    assert len(list((tmp_path / "out").iterdir())) == 3
