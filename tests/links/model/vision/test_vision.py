"""The zoo of vision models: numbers against PyTorch, layers by name, images in, weights from files.

The networks are narrow: full ones have up to 144 million parameters.
"""

from __future__ import annotations

import os
import re

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import serializers
from dbrdist.core.files import safetensors
from dbrdist.errors import CheckpointError
from dbrdist.links.model.vision import googlenet, pixels, resnet, vgg
from dbrdist.links.model.vision.layers import VisionLayers
from tests.each import each
from tests.links.model.vision.vision_helpers import NarrowGoogLeNet, NarrowResNet, NarrowVGG, evaluated, images, stirred

MAKERS = {
    "vgg": lambda weights=None: NarrowVGG(weights),
    "resnet": lambda weights=None: NarrowResNet(weights, 50),
    "googlenet": lambda weights=None: NarrowGoogLeNet(weights),
}


# ---- numbers --------------------------------------------------------------------------------------------------------
def close(ours, theirs, what=""):
    """Equal but for rounding, by the largest number: both networks are deep."""
    ours, theirs = np.asarray(ours, np.float64), theirs.detach().numpy().astype(np.float64)
    assert ours.shape == theirs.shape
    assert abs(ours - theirs).max() <= 2e-4 * abs(theirs).max() + 1e-7, what


def in_torch(model, names):
    """The model's weights and statistics as tensors by torchvision's names, or by path."""
    torch = pytest.importorskip("torch")
    serializer = serializers.DictionarySerializer()
    serializer.save(model)
    found = {}
    for path, array in serializer.target.items():
        name = names(path) if array is not None and np.ndim(array) else None
        if name is not None:
            found[name] = torch.tensor(np.array(array))
    return found


def compare(model, module, x, layer):
    """Scores and gradients of a model and of a PyTorch module with the same weights."""
    import torch

    ours = evaluated(model, x, [layer, "prob"])
    theirs = module(torch.tensor(x))
    close(ours[layer].array, theirs)
    close(ours["prob"].array, theirs.softmax(1))
    weights = np.random.default_rng(1).normal(size=ours[layer].shape).astype(np.float32)
    model.cleargrads()
    F.sum(ours[layer] * weights).backward()
    (theirs * torch.tensor(weights)).sum().backward()
    grads = {name: p.grad for name, p in module.named_parameters()}
    compared = 0
    for path, p in model.namedparams():
        name = model._torchvision_name(path.strip("/"))
        if name is not None:
            close(p.grad, grads[name], path)
            compared += 1
    assert compared == len(grads)


@pytest.mark.torch
@pytest.mark.parametrize("n_layers", [16, 19])
def test_vgg_is_torchvisions(tmp_path, n_layers):
    torch = pytest.importorskip("torch")
    from tests.links.model.vision import vision_in_torch

    torch.manual_seed(0)
    module = vision_in_torch.VGG(n_layers, NarrowVGG.channels, 12, 5).eval()
    path = str(tmp_path / "vgg.safetensors")
    safetensors.save(path, {name: a.numpy() for name, a in module.state_dict().items()})
    model = NarrowVGG(path, n_layers)
    assert model.convention == "torchvision"
    compare(model, module, images(1), "fc8")


@pytest.mark.torch
@pytest.mark.parametrize(("n_layers", "size"), [(50, 224), (101, 97), (152, 64)])
@pytest.mark.parametrize("chainer", [False, True], ids=["torchvision", "chainer"])
def test_resnet_is_that_of_torchvision_or_of_chainer(tmp_path, n_layers, size, chainer):
    torch = pytest.importorskip("torch")
    from tests.links.model.vision import vision_in_torch

    torch.manual_seed(0)
    module = vision_in_torch.ResNet(resnet._BLOCKS[n_layers], NarrowResNet.channels, 5, chainer).eval()
    model = stirred(NarrowResNet(None, n_layers, downsample_fb=not chainer))
    model.conv1.b.array[...] = 0  # torchvision has none
    weights = in_torch(model, lambda path: None if path == "conv1/b" else model._torchvision_name(path))
    assert set(weights) == {name for name in module.state_dict() if "num_batches" not in name}
    module.load_state_dict(weights, strict=False)
    if not chainer:
        path = str(tmp_path / "resnet.safetensors")
        safetensors.save(path, {name: a.numpy() for name, a in module.state_dict().items()})
        model = NarrowResNet(path, n_layers, downsample_fb=True)
    compare(model, module, images(2, size), "fc6")


@pytest.mark.torch
def test_googlenet_is_that_of_plain_pytorch():
    torch = pytest.importorskip("torch")
    from tests.links.model.vision import vision_in_torch

    model, x = stirred(NarrowGoogLeNet(None)), images(2)
    weights = in_torch(model, lambda path: path)
    for w in weights.values():
        w.requires_grad_()
    ours = evaluated(model, x, ["loss1_fc2", "loss2_fc2", "loss3_fc"])
    theirs = vision_in_torch.googlenet(weights, torch.tensor(x))
    for name, y in ours.items():
        close(y.array, theirs[name], name)
    ours_sum = theirs_sum = 0
    for k, name in enumerate(theirs):
        factors = np.random.default_rng(k).normal(size=ours[name].shape).astype(np.float32)
        ours_sum = ours_sum + F.sum(ours[name] * factors)
        theirs_sum = theirs_sum + (theirs[name] * torch.tensor(factors)).sum()
    model.cleargrads()
    ours_sum.backward()
    theirs_sum.backward()
    for path, p in model.namedparams():
        close(p.grad, weights[path.strip("/")].grad, path)


# ---- layers ---------------------------------------------------------------------------------------------------------
STAGES = [f"inception_{name}" for name in ("3a", "3b", "4a", "4b", "4c", "4d", "4e", "5a", "5b")]
LAYERS = {
    "vgg": [
        "conv1_1", "conv1_2", "pool1", "conv2_1", "conv2_2", "pool2", "conv3_1", "conv3_2", "conv3_3", "pool3",
        "conv4_1", "conv4_2", "conv4_3", "pool4", "conv5_1", "conv5_2", "conv5_3", "pool5", "fc6", "fc7", "fc8", "prob",
    ],
    "resnet": ["conv1", "pool1", "res2", "res3", "res4", "res5", "pool5", "fc6", "prob"],
    "googlenet": [
        "conv1", "pool1", "conv2_reduce", "conv2", "pool2", *STAGES[:2], "pool3", *STAGES[2:7], "pool4", *STAGES[7:],
        "pool5", "loss3_fc", "prob", "loss1_fc2", "loss2_fc2",
    ],
}  # fmt: skip


@pytest.fixture(scope="module", params=MAKERS)
def made(request):
    return request.param, stirred(MAKERS[request.param]())


def test_layers_have_names_and_shapes(made):
    name, model = made
    assert model.available_layers == list(model.functions) == LAYERS[name]
    found = evaluated(model, images(1), LAYERS[name])
    assert list(found) == LAYERS[name]
    rows = {key: y.shape[2] for key, y in found.items() if y.ndim == 4}
    expected = {
        "vgg": {"conv1_1": 224, "pool1": 112, "pool2": 56, "pool3": 28, "conv5_3": 14, "pool5": 7},
        "resnet": {"conv1": 112, "pool1": 56, "res2": 56, "res3": 28, "res4": 14, "res5": 7},
        "googlenet": {"conv1": 112, "pool1": 56, "pool2": 28, "pool3": 14, "pool4": 7, "pool5": 1},
    }[name]
    assert {key: rows[key] for key in expected} == expected
    assert found["prob"].shape == (1, 5) and found["prob"].array.sum() == pytest.approx(1, abs=1e-5)
    alone = evaluated(model, images(1))
    np.testing.assert_array_equal(alone["prob"].array, found["prob"].array)
    assert list(alone) == ["prob"] and evaluated(model, images(1), []) == {}


def test_only_what_is_asked_for_is_computed(made):
    name, model = made
    called = []

    class Note(dbrdist.LinkHook):
        name = "Note"

        def forward_postprocess(self, args):
            called.append(args.link.name)

    with Note():
        first = LAYERS[name][0]
        assert list(evaluated(model, images(1), first)) == [first]
    assert set(called) - {None} <= {first, "bn1", type(model).__name__}
    with pytest.raises(ValueError, match=re.escape(f"layers: expected names of {LAYERS[name][0]}, ")):
        model(images(1), ["prob", "fc9"])


def test_dropout_and_statistics_follow_the_configuration():
    model = stirred(NarrowVGG(None))
    a, b = (model(images(1), ["fc8"])["fc8"].array for _ in range(2))
    assert not np.array_equal(a, b)
    a, b = (evaluated(model, images(1), ["fc8"])["fc8"].array for _ in range(2))
    np.testing.assert_array_equal(a, b)


def test_the_known_sizes():
    """Of Simonyan and Zisserman, table 2, and of torchvision's page, whose ResNets have no bias in conv1."""
    full = {"vgg16": (vgg.VGG16Layers, 138_357_544), "vgg19": (vgg.VGG19Layers, 143_667_240)}
    for maker, size in full.values():
        narrow = NarrowVGG(None, int(maker.__name__[3:5]))
        widths = dict(zip(range(1, 6), vgg.VGGLayers.channels))
        total, last = 0, 3
        for link in narrow.children():
            if link.name.startswith("conv"):
                out = widths[int(link.name[4])]
                total, last = total + 9 * last * out + out, out
        total += (last * 49 + 1) * 4096 + 4097 * 4096 + 4097 * 1000
        assert total == size


@pytest.mark.slow
@pytest.mark.parametrize(("maker", "size"), [
    (lambda: L.ResNet50Layers(None), 25_557_032 + 64),
    (lambda: L.GoogLeNet(None), 13_378_280),
])  # fmt: skip
def test_full_networks_have_the_known_sizes(maker, size):
    assert maker().count_params() == size


@pytest.mark.slow
def test_a_resnet_has_as_many_layers_as_its_name_says():
    for num_layers, blocks in resnet._BLOCKS.items():
        assert 1 + 3 * sum(blocks) + 1 == num_layers  # a convolution, three in each block, a linear layer
        model = NarrowResNet(None, num_layers)
        assert tuple(len(list(model[f"res{k}"].children())) for k in range(2, 6)) == blocks


def test_copies_are_independent(made):
    _, model = made
    other = model.copy("copy")
    before = evaluated(model, images(1))["prob"].array
    for p in other.params():
        p.array[...] = 0
    np.testing.assert_array_equal(evaluated(model, images(1))["prob"].array, before)
    np.testing.assert_allclose(evaluated(other, images(1))["prob"].array, 0.2)


# ---- images ---------------------------------------------------------------------------------------------------------
def photo(rows=224, columns=224):
    return np.random.default_rng(2).integers(0, 256, (rows, columns, 3), np.uint8)


@each(module=[vgg, resnet, googlenet])
def test_images_become_blue_green_and_red_less_their_means(module):
    rgb = photo()
    mean = {vgg: (103.939, 116.779, 123.68), resnet: (103.063, 115.903, 123.152), googlenet: (104, 117, 123)}[module]
    expected = np.stack([rgb[:, :, c].astype(np.float64) - m for c, m in zip((2, 1, 0), mean)])
    for image in (rgb, rgb.transpose(2, 0, 1), rgb.astype(np.float64)):
        found = module.prepare(image)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, atol=1e-4)
    small = photo(5, 7)
    assert module.prepare(small, None).shape == (3, 5, 7)


def test_other_images_need_pillow():
    Image = pytest.importorskip("PIL.Image")
    rgb = photo(10, 20)
    for image in (rgb, Image.fromarray(rgb)):
        found = vgg.prepare(image, (8, 4))  # columns, rows
        expected = np.asarray(Image.fromarray(rgb).resize((8, 4)), np.float64)[:, :, ::-1] - vgg._MEAN
        np.testing.assert_allclose(found, expected.transpose(2, 0, 1), atol=1e-4)
    grey = rgb[:, :, 0]
    for image in (grey, grey[None], grey[:, :, None], Image.fromarray(grey)):
        found = vgg.prepare(image, None)
        np.testing.assert_allclose(found, [grey - np.float64(m) for m in vgg._MEAN], atol=1e-4)
    with_alpha = np.concatenate([rgb, rgb[:, :, :1]], 2)
    np.testing.assert_array_equal(vgg.prepare(with_alpha, None), vgg.prepare(rgb, None))
    for bad in (np.zeros(3), np.zeros((5, 5, 2)), np.zeros((2, 3, 4, 5)), np.zeros((0, 4, 3))):
        with pytest.raises(ValueError, match="prepare: image: expected an image of shape"):
            vgg.prepare(bad)


def test_without_pillow_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(ImportError, match="need Pillow: pip install pillow"):
        vgg.prepare(photo(), (10, 10))
    vgg.prepare(photo())


def test_features_of_images(made):
    name, model = made
    pictures = [photo(), photo()[::-1]]
    with dbrdist.using_config("train", False):
        ((key, found),) = model.extract(pictures).items()
        assert key == {"vgg": "fc7", "resnet": "pool5", "googlenet": "pool5"}[name]
        module = {"vgg": vgg, "resnet": resnet, "googlenet": googlenet}[name]
        expected = model(np.stack([module.prepare(image) for image in pictures]), [key])[key]
        np.testing.assert_array_equal(found.array, expected.array)
        assert set(model.extract(pictures, ["prob", LAYERS[name][0]], size=None)) == {"prob", LAYERS[name][0]}
    for bad in ([], np.zeros(3), np.zeros((224, 224)), np.zeros((0, 3, 224, 224))):
        with pytest.raises(ValueError, match="images: expected a list of images"):
            model.extract(bad)


def test_an_array_of_grey_images_is_a_list_of_them():
    pytest.importorskip("PIL")
    pictures = np.stack([photo(), photo()[::-1]])[..., 0]
    model = NarrowVGG(None)
    np.testing.assert_array_equal(model._batch(pictures, None), [vgg.prepare(image, None) for image in pictures])


@pytest.mark.slow
def test_predictions_are_means_over_ten_crops():
    pytest.importorskip("PIL")
    model = stirred(NarrowResNet(None, 50))
    model.fc6.W.array[...] *= 1e-4  # else one class has all the probability, whatever is seen
    pictures = [photo(256, 256), photo(256, 256)[:, ::-1]]
    found = model.predict(pictures)
    x = np.stack([resnet.prepare(image, None) for image in pictures])
    crops = [x[:, :, i : i + 224, j : j + 224] for i in (0, 32) for j in (0, 32)] + [x[:, :, 16:240, 16:240]]
    probabilities = [evaluated(model, c)["prob"].array for crop in crops for c in (crop, crop[..., ::-1])]
    np.testing.assert_allclose(found.array, np.mean(probabilities, 0), rtol=1e-5, atol=1e-7)
    assert found.creator is None and found.dtype == np.float32
    middle = model.predict(pictures, oversample=False).array
    np.testing.assert_allclose(middle, evaluated(model, crops[4])["prob"].array, rtol=1e-5)


def test_images_for_torchvisions_weights():
    rgb = photo(5, 4)
    found = pixels.standardize(rgb, None)
    mean, deviation = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    expected = [(rgb[:, :, c] / 255 - mean[c]) / deviation[c] for c in range(3)]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    model = NarrowVGG(None)
    model.use_torchvision()
    np.testing.assert_array_equal(model._batch([photo()], None)[0], pixels.standardize(photo(), None))


# ---- weights --------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_weights_come_from_a_file(tmp_path, made):
    name, model = made
    paths = [str(tmp_path / "w.npz"), str(tmp_path / "w.safetensors")]
    serializers.save_npz(paths[0], model)
    arrays = {path.replace("/", "."): a for path, a in np.load(paths[0]).items() if path != "dbrdist.json"}
    safetensors.save(paths[1], arrays)
    with open(tmp_path / "chainers", "wb") as file:  # whatever it is called, and without an entry of ours
        np.savez(file, **{path.replace(".", "/"): a for path, a in arrays.items()})
    expected = evaluated(model, images(1))["prob"].array
    for path in (*paths, str(tmp_path / "chainers")):
        other = MAKERS[name](path)
        assert other.convention == "chainer"
        np.testing.assert_array_equal(evaluated(other, images(1))["prob"].array, expected)


def test_auto_looks_in_chainers_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CHAINER_DATASET_ROOT", str(tmp_path))
    folder = tmp_path / "pfnet" / "chainer" / "models"
    for maker, file in (
        (lambda: NarrowVGG("auto", 16), "VGG_ILSVRC_16_layers.npz"),
        (lambda: NarrowVGG("auto", 19), "VGG_ILSVRC_19_layers.npz"),
        (lambda: NarrowResNet("auto", 101), "ResNet-101-model.npz"),
        (NarrowGoogLeNet, "bvlc_googlenet.npz"),
    ):
        words = f"pretrained_model='auto' takes {folder / file}, and there is no such file; nothing is downloaded: put "
        with pytest.raises(FileNotFoundError, match=re.escape(words + file)):
            maker()
    folder.mkdir(parents=True)
    model = stirred(NarrowVGG(None))
    serializers.save_npz(str(folder / "VGG_ILSVRC_16_layers.npz"), model)
    np.testing.assert_array_equal(NarrowVGG().fc8.W.array, model.fc8.W.array)
    monkeypatch.delenv("CHAINER_DATASET_ROOT")
    with pytest.raises(
        FileNotFoundError, match=re.escape(os.path.join(os.path.expanduser("~"), ".chainer", "dataset"))
    ):
        NarrowGoogLeNet()


def test_files_that_do_not_fit_are_refused(tmp_path):
    path = tmp_path / "w.npz"
    serializers.save_npz(str(path), NarrowVGG(None))
    with pytest.raises(CheckpointError, match=re.escape(f"{path}: conv3_4/W: expected this entry in the saved state")):
        NarrowVGG(str(path), 19)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=re.escape(f"{path}: cannot be read as an .npz file")):
        NarrowVGG(path)
    with pytest.raises(FileNotFoundError, match=r"pretrained_model='nowhere.npz', and there is no such file"):
        NarrowVGG("nowhere.npz")
    with pytest.raises(ValueError, match=r"expected an .npz or .safetensors file, got Caffe's x.caffemodel"):
        NarrowVGG("x.caffemodel")
    with pytest.raises(ValueError, match="n_layers: expected 16 or 19, got 17"):
        NarrowVGG(None, 17)
    with pytest.raises(ValueError, match="n_layers: expected 50 or 101 or 152, got 18"):
        NarrowResNet(None, 18)


def torchvisions(model):
    """The names of torchvision with arrays of the model's shapes."""
    state = {}
    for path in model._paths():
        link, (*parts, name) = model, path.split("/")
        for part in parts:
            link = link[part]
        entry = getattr(link, name)
        state[path] = np.array(getattr(entry, "array", entry))
    found = {model._torchvision_name(path): a for path, a in state.items()}
    found.pop(None, None)
    return found


@pytest.mark.slow
def test_torchvisions_weights_that_do_not_fit_are_refused(tmp_path):
    path = str(tmp_path / "w.safetensors")
    weights = torchvisions(stirred(NarrowResNet(None, 50)))
    assert {"conv1.weight", "layer1.0.downsample.1.running_var", "layer4.2.conv3.weight", "fc.bias"} <= set(weights)
    safetensors.save(path, weights)
    with pytest.raises(CheckpointError, match="halve the image in 3x3 convolutions: pass downsample_fb=True"):
        NarrowResNet(path, 50)
    model = NarrowResNet(path, 50, downsample_fb=True)
    assert {link.eps for link in model.links() if isinstance(link, L.BatchNormalization)} == {1e-5}
    with pytest.raises(CheckpointError, match=r"torchvision's .*, but layer3.10.bn1.bias is not in it"):
        NarrowResNet(path, 101, downsample_fb=True)
    safetensors.save(path, {**weights, "fc2.weight": np.zeros(3)})
    with pytest.raises(CheckpointError, match=f"{re.escape(path)}: expected the .* but fc2.weight has no place"):
        NarrowResNet(path, 50, downsample_fb=True)
    safetensors.save(path, {**weights, "fc.bias": np.zeros(3, np.float32)})
    with pytest.raises(CheckpointError, match=r"fc6/b: expected shape \(5,\) as in the object, found \(3,\)"):
        NarrowResNet(path, 50, downsample_fb=True)
    with pytest.raises(CheckpointError, match="Chainer's NarrowGoogLeNet: that of torchvision is another network"):
        NarrowGoogLeNet(path)


def test_a_network_of_ones_own_says_what_to_define():
    with pytest.raises(NotImplementedError, match="VisionLayers must define functions"):
        VisionLayers().available_layers  # noqa: B018
