"""A small single shot detector (Liu et al. 2016, arXiv:1512.02325): its default boxes, network and loss."""

import numpy as np
from boxes import bbox_iou, non_maximum_suppression

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L

VARIANCE = np.array([0.1, 0.1, 0.2, 0.2], np.float32)  # of centre and size, so that what is learned is about 1


class MultiboxCoder:
    """Between objects and what the network gives for each default box.

    ``grids`` has for each feature map its number of rows and the lengths of its boxes, as fractions of the image; each
    length has boxes of the shapes 1:1, 1:2 and 2:1.
    """

    def __init__(self, size, grids):
        self.size, boxes = size, []
        for rows, lengths in grids:
            for y in range(rows):
                for x in range(rows):
                    for length in lengths:
                        for shape in (1.0, 2.0**0.5, 0.5**0.5):
                            boxes.append([(y + 0.5) / rows, (x + 0.5) / rows, length / shape, length * shape])
        self.default = np.array(boxes, np.float32) * size  # centre and size, in pixels
        self.corners = _corners(self.default)

    def encode(self, bbox, label, iou_thresh=0.5):
        """Offsets (K, 4) and labels (K,) of the default boxes, 0 for the background and 1 + l for objects of label l.

        An object belongs to the box that overlaps it most and to all that overlap it by ``iou_thresh``.
        """
        offsets, labels = np.zeros_like(self.default), np.zeros(len(self.default), np.int32)
        if not len(bbox):
            return offsets, labels
        iou = bbox_iou(self.corners, bbox)
        owner = np.where(iou.max(axis=1) >= iou_thresh, iou.argmax(axis=1), -1)
        for _ in range(len(bbox)):  # each object gets a box of its own, the best pair first
            box, obj = np.unravel_index(iou.argmax(), iou.shape)
            owner[box], iou[box], iou[:, obj] = obj, -1, -1
        of = owner >= 0
        target = bbox[owner[of]].astype(np.float32)
        center, length = (target[:, :2] + target[:, 2:]) / 2, target[:, 2:] - target[:, :2]
        default = self.default[of]
        offsets[of] = (
            np.concatenate([(center - default[:, :2]) / default[:, 2:], np.log(length / default[:, 2:])], axis=1)
            / VARIANCE
        )
        labels[of] = 1 + label[owner[of]]
        return offsets, labels

    def decode(self, offsets, scores, nms_thresh=0.45, score_thresh=0.6):
        """Boxes, labels and probabilities of the objects in one image."""
        offsets = offsets * VARIANCE
        center = self.default[:, :2] + offsets[:, :2] * self.default[:, 2:]
        corners = np.clip(
            _corners(np.concatenate([center, self.default[:, 2:] * np.exp(offsets[:, 2:])], 1)), 0, self.size
        )
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
        found = []
        for label in range(1, scores.shape[1]):
            among = np.flatnonzero(scores[:, label] >= score_thresh)
            kept = among[non_maximum_suppression(corners[among], nms_thresh, scores[among, label])]
            found.append((corners[kept], np.full(len(kept), label - 1, np.int32), scores[kept, label]))
        return tuple(np.concatenate(parts) for parts in zip(*found))


def _corners(boxes):
    """(y_min, x_min, y_max, x_max) of centres and sizes."""
    return np.concatenate([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], axis=1)


class Block(dbrdist.Chain):
    """Convolution, batch normalization, ReLU."""

    def __init__(self, channels, stride=1):
        super().__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(None, channels, 3, stride, 1, nobias=True)
            self.bn = L.BatchNormalization(channels)

    def forward(self, x):
        return F.relu(self.bn(self.conv(x)))


class SSD(dbrdist.Chain):
    """Images (N, 3, 64, 64) -> offsets (N, K, 4) and scores (N, K, 1 + labels) of K default boxes on two maps."""

    def __init__(self, labels, size=64):
        super().__init__()
        self.coder = MultiboxCoder(size, [(8, (0.22, 0.34)), (4, (0.45, 0.62))])
        self.classes = labels + 1
        with self.init_scope():
            self.first = dbrdist.Sequential(Block(16, 2), Block(32, 2), Block(32), Block(64, 2), Block(64))
            self.second = dbrdist.Sequential(Block(64, 2), Block(64))
            self.heads = dbrdist.ChainList(*[L.Convolution2D(None, 6 * (4 + self.classes), 3, 1, 1) for _ in range(2)])

    def forward(self, x):
        fine = self.first(x)
        found = []
        for head, h in zip(self.heads, (fine, self.second(fine))):
            y = F.transpose(head(h), (0, 2, 3, 1))
            found.append(F.reshape(y, (len(y), -1, 4 + self.classes)))
        found = F.concat(found, axis=1)
        return found[:, :, :4], found[:, :, 4:]

    def predict(self, imgs, score_thresh=0.6):
        """Lists of boxes, labels and probabilities of at least ``score_thresh``, one entry for each image."""
        with dbrdist.using_config("train", False), dbrdist.no_backprop_mode():
            offsets, scores = self(self.xp.asarray(np.stack(imgs)))
        pairs = zip(dbrdist.backend.to_cpu(offsets.array), dbrdist.backend.to_cpu(scores.array))
        return tuple(map(list, zip(*[self.coder.decode(*pair, score_thresh=score_thresh) for pair in pairs])))


def multibox_loss(offsets, scores, true_offsets, true_labels, k=3):
    """Losses of places and of labels, each divided by the number of boxes with an object.

    Of the background count only the ``k`` boxes for each with an object where the network errs most.
    """
    xp = offsets.xp
    positive = true_labels > 0
    count = max(int(positive.sum()), 1)
    place = F.sum(_huber(offsets - true_offsets), axis=2)
    place = F.sum(place * positive.astype(offsets.dtype)) / count
    n, boxes, classes = scores.shape
    label = F.reshape(
        F.softmax_cross_entropy(scores.reshape(-1, classes), true_labels.reshape(-1), reduce="no"), (n, boxes)
    )
    wrong = xp.where(positive, -1.0, label.array)
    rank = wrong.argsort(axis=1)[:, ::-1].argsort(axis=1)
    negative = (rank < k * positive.sum(axis=1, keepdims=True)) & ~positive
    label = F.sum(label * (positive | negative).astype(scores.dtype)) / count
    return place, label


def _huber(x):
    """x^2 / 2 within 1 of zero, |x| - 1/2 beyond, elementwise."""
    inner = F.clip(x, -1.0, 1.0)
    return 0.5 * inner * inner + (F.absolute(x) - F.absolute(inner))
