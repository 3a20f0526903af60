"""The programs of examples/ run for a few steps, and learn something in them; examples/README.md lists them all."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

import dbrdist

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = sorted(path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.glob("*/*.py"))
PROGRAMS = [name for name in PROGRAMS if not name.startswith("multi_node/")]  # they have a table and tests of their own
MODULES = ["detection/boxes.py", "detection/ssd.py"]  # of one program, with tests of their own
PROGRAMS = [name for name in PROGRAMS if name not in MODULES]


def load(name):
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(Path(name).stem, EXAMPLES / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def text(tmp_path):
    """A text of three sentences in random order: about a tenth of a bit per character for who knows them."""
    sentences = ["the cat sat on the mat .", "a dog ran to the old gate .", "two birds sing in a tree ."]
    rng = np.random.default_rng(0)
    path = tmp_path / "text.txt"
    path.write_text("\n".join(sentences[i] for i in rng.integers(0, 3, 200)))
    return str(path)


def test_char_lstm(text):
    words = ["--units", "32", "--batch", "8", "--steps", "20", "--sample", "5"]
    assert load("text/char_lstm.py").main([text, *words, "--epochs", "4"]) < 2.2  # 4.4 bits know nothing


def test_char_lstm_counts_each_character_once():
    windows = list(load("text/char_lstm.py").windows(np.arange(100), 3, 10))
    xs, ts = (np.concatenate([pair[i] for pair in windows]) for i in (0, 1))
    np.testing.assert_array_equal(xs.T.ravel(), np.arange(99))
    np.testing.assert_array_equal(ts.T.ravel(), np.arange(1, 100))
    assert [len(x) for x, _ in windows] == [10, 10, 10, 3]


def test_ptb_lstm(text, tmp_path):
    words = ["--units", "24", "--dropout", "0.1", "--batch", "5", "--steps", "10", "--out", str(tmp_path / "out")]
    assert load("text/ptb_lstm.py").main([text, text, *words, "--epochs", "5"]) < 10.0  # of 19 words


def test_transformer(text):
    words = ["--units", "32", "--heads", "2", "--layers", "1", "--context", "16", "--updates", "80"]
    module = load("text/transformer.py")
    assert module.main([text, *words]) < 3.6
    model = module.Transformer(7, 6, 8, 2, 2, 0.0)
    x = np.array([[0, 1, 2, 3, 4, 5]])
    y = model(x).array
    x[0, 4] = 6  # no position sees what comes after it
    same = np.abs(model(x).array - y).max(axis=1) == 0
    assert same.tolist() == [True] * 4 + [False] * 2


@pytest.mark.parametrize("loss", ["negative", "hierarchical", "full"])
def test_word2vec(loss, tmp_path):
    """Two subjects, never together: the words of one are each other's neighbours."""
    rng = np.random.default_rng(0)
    subjects = [["sun", "rain", "wind", "snow", "fog"], ["bread", "milk", "cheese", "salt", "egg"]]
    parts = [" ".join(rng.choice(subjects[i % 2], 12)) for i in range(60)]
    (tmp_path / "text.txt").write_text(" ".join(parts))
    words = ["--units", "8", "--batch", "50", "--often", "1", "--window", "2", "--epochs", "12", "--show", "rain"]
    module = load("text/word2vec.py")
    names, vectors = module.main([str(tmp_path / "text.txt"), "--loss", loss, *words])
    for subject in subjects:
        assert set(module.neighbours(vectors, names, subject[0], 4)) == set(subject[1:])


def test_seq2seq():
    module = load("text/seq2seq.py")
    day = module.datetime.date(2021, 3, 7)
    texts = ["7 march 2021", "march 7, 2021", "sunday, 7 march 2021", "7.3.2021", "3/7/2021", "7-mar-2021"]
    assert [module.written(day, form) for form in module.FORMATS[:6]] == texts
    pairs = module.make_pairs(40, np.random.default_rng(0))
    model = module.Seq2Seq(32)
    optimizer = dbrdist.optimizers.Adam(alpha=0.01).setup(model)
    losses = []
    for _ in range(8):
        loss = model(*module.as_sequences(pairs, dbrdist.get_device("@numpy")))
        model.cleargrads()
        loss.backward()
        optimizer.update()
        losses.append(float(loss.array))
    assert losses[0] > 3.5 and losses[-1] < 2.8
    assert len(model.translate([pairs[0][0], pairs[1][0]], limit=3)) == 2


def test_tree():
    module = load("text/tree.py")
    tree = ("or", ("not", ("and", "birds fly", "stones swim")), "fish walk")
    assert module.is_true(tree) and not module.is_true(("not", tree))
    assert sorted(module.leaves(tree)) == ["and", "birds fly", "fish walk", "not", "or", "stones swim"]
    pairs = module.make(30, np.random.default_rng(0), (1, 2))
    model = module.TreeNet(12)
    before = module.accuracy(model, pairs)
    module.train(model, pairs, module.argparse.Namespace(epochs=10, batch=10))
    assert before < 0.75 and module.accuracy(model, pairs) > 0.85


def test_vae(tmp_path):
    pytest.importorskip("PIL", reason="writes pictures with Pillow")
    bound, closer = load("images/vae.py").main(["--epochs", "3", "--units", "100", "--out", str(tmp_path)])
    assert -31 < bound < closer < -20  # -44.4 nats know nothing
    assert (tmp_path / "samples.png").stat().st_size > 1000


def test_dcgan(tmp_path):
    pillow = pytest.importorskip("PIL.Image", reason="reads and writes pictures with Pillow")
    rng = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
    for i in range(20):  # all of them red
        a = np.stack([rng.integers(200, 256, (16, 16)), *rng.integers(0, 50, (2, 16, 16))], axis=2)
        pillow.fromarray(a.astype(np.uint8)).save(tmp_path / "images" / f"{i}.png")
    words = ["--images", str(tmp_path / "images"), "--size", "16", "--width", "8", "--batch", "5"]
    module = load("images/dcgan.py")
    generator = module.main([*words, "--epochs", "40", "--out", str(tmp_path)])
    with dbrdist.using_config("train", False):
        red, green, blue = generator(rng.standard_normal((50, 32)).astype(np.float32)).array.mean(axis=(0, 2, 3))
    assert red > 0.1 + max(green, blue), (red, green, blue)
    with pillow.open(tmp_path / "samples.png") as picture:
        assert picture.size == (540, 540)


def test_cart_pole_follows_the_equations():
    """Against the published equations, written for one cart; without a push's help the pole falls."""
    x, v, angle, w = state = np.array([0.1, -0.2, 0.05, 0.3])
    push = (10 + 0.1 * 0.5 * w**2 * np.sin(angle)) / 1.1
    turn = (9.8 * np.sin(angle) - np.cos(angle) * push) / (0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1))
    gain = push - 0.1 * 0.5 * turn * np.cos(angle) / 1.1
    expected = [x + 0.02 * v, v + 0.02 * gain, angle + 0.02 * w, w + 0.02 * turn]
    cart_pole = load("control/dqn.py").cart_pole
    after, failed = cart_pole(state[None], np.array([1]))
    np.testing.assert_allclose(after[0], expected, rtol=1e-12)
    assert not failed[0]
    for _ in range(60):
        after, failed = cart_pole(after, np.array([1]))
    assert failed[0]


def test_dqn():
    assert load("control/dqn.py").main(["--steps", "1000", "--explore", "300", "--units", "32"]) > 8


def beside(name, monkeypatch):
    """An example that imports others of its folder."""
    monkeypatch.syspath_prepend(str((EXAMPLES / name).parent))
    return load(name)


def test_ppo_balances_the_pole_longer_than_chance(monkeypatch):
    main = beside("control/ppo.py", monkeypatch).main
    words = ["--simulations", "8", "--steps", "64", "--units", "16", "--parts", "2"]
    assert main([*words, "--rollouts", "8", "--alpha", "3e-3"]) > 40  # a constant push fails after 10 steps


def test_advantages_of_ppo_are_sums_of_what_was_not_expected(monkeypatch):
    """Against the definition, sum over l of (discount smoothing)^l times the surprise, which ends with the episode."""
    ppo = beside("control/ppo.py", monkeypatch)
    network = ppo.Network(8)
    simulations = ppo.Simulations(3, 0, 1, np.random.default_rng(0))
    begin, lengths = simulations.state.copy(), simulations.length.copy()
    states, pushes, log_p, advantages, returns = simulations.rollout(network, 40, 0.9, 0.8)
    np.testing.assert_array_equal(states[0], begin.astype("f"))
    values = np.stack([network.of_arrays(s)[1] for s in states])
    np.testing.assert_allclose(returns - advantages, values, atol=1e-5)
    for n in range(3):
        for t in range(40):
            expected, factor = 0.0, 1.0
            for later in range(t, 40):
                after, failed = ppo.cart_pole(states[later, n][None].astype(float), pushes[later, n][None])
                worth = 0.0 if failed[0] else network.of_arrays(after)[1][0]
                expected += factor * (1.0 + 0.9 * worth - values[later, n])
                factor *= 0.9 * 0.8
                if failed[0]:
                    break
            assert abs(advantages[t, n] - expected) < 1e-3
    assert (lengths == 0).all() and log_p.max() <= 0


@pytest.mark.parametrize("name", ["by_hand", "with_trainer"])
def test_paper(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load(f"paper/{name}.py").main(["--epochs", "3"]) > 0.85


def test_the_papers_programs_train_alike(tmp_path, monkeypatch):
    """Both see the same batches, so both end with the same accuracy."""
    monkeypatch.chdir(tmp_path)
    found = [load(f"paper/{name}.py").main(["--epochs", "2"]) for name in ("by_hand", "with_trainer")]
    assert found[0] == pytest.approx(found[1], abs=1e-6)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if re.search(r"text/(char|ptb|trans|word)", name)])
def test_missing_text_says_what_to_put_there(name, capsys):
    words = ["absent.txt"] * (2 if "ptb" in name else 1)
    with pytest.raises(SystemExit) as found:
        load(name).main(words)
    assert found.value.code == 2
    assert re.search(r"absent.txt: no such file; .*such as|Penn Treebank", capsys.readouterr().err)


def test_missing_images_say_so(capsys):
    with pytest.raises(SystemExit):
        load("images/dcgan.py").main(["--images", "absent"])
    assert "absent: no such folder; one with JPEG or PNG files is needed" in capsys.readouterr().err


def test_the_table_lists_every_program():
    table = (EXAMPLES / "README.md").read_text()
    listed = re.findall(r"^\| \[\S+\]\(([^)]+)\)", table, re.M)
    assert [name for name in PROGRAMS if name not in listed] == []
    assert [name for name in listed if not (EXAMPLES / name).exists()] == []
