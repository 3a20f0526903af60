"""Boxes of objects in images: how they change with the image, how they overlap, and how good found ones are.

The names, arguments and results are those of ChainerCV: an image is an array (C, H, W), boxes are an array (R, 4) of
rows (y_min, x_min, y_max, x_max) in pixels.
"""

import numpy as np

# ---- transforms -----------------------------------------------------------------------------------------------------


def flip(img, y_flip=False, x_flip=False, copy=False):
    """The image upside down (``y_flip``) and mirrored (``x_flip``)."""
    img = img[:, :: -1 if y_flip else 1, :: -1 if x_flip else 1]
    return img.copy() if copy else img


def flip_bbox(bbox, size, y_flip=False, x_flip=False):
    """Boxes in an image of ``size`` (H, W) that was flipped."""
    (height, width), bbox = size, bbox.copy()
    if y_flip:
        bbox[:, [0, 2]] = height - bbox[:, [2, 0]]
    if x_flip:
        bbox[:, [1, 3]] = width - bbox[:, [3, 1]]
    return bbox


def resize_bbox(bbox, in_size, out_size):
    """Boxes in an image that was resized from ``in_size`` to ``out_size``, both (H, W)."""
    y, x = (after / before for before, after in zip(in_size, out_size))
    return bbox * np.array([y, x, y, x], bbox.dtype)


def translate_bbox(bbox, y_offset=0, x_offset=0):
    """Boxes in an image that was moved, as when it is pasted into a larger one."""
    return bbox + np.array([y_offset, x_offset, y_offset, x_offset], bbox.dtype)


def crop_bbox(bbox, y_slice=None, x_slice=None, allow_outside_center=True, return_param=False):
    """Boxes in the part of an image that the slices select; those that have no area there are left out.

    Without ``allow_outside_center`` a box must have its centre in that part. With ``return_param`` a dictionary follows
    whose ``index`` says which boxes stay.
    """
    low = np.array([0 if s is None else s.start or 0 for s in (y_slice, x_slice)], float)
    high = np.array([np.inf if s is None or s.stop is None else s.stop for s in (y_slice, x_slice)])
    kept = np.ones(len(bbox), bool)
    if not allow_outside_center:
        center = (bbox[:, :2] + bbox[:, 2:]) / 2
        kept = ((low <= center) & (center < high)).all(axis=1)
    begin, end = np.maximum(bbox[:, :2], low), np.minimum(bbox[:, 2:], high)
    kept &= (begin < end).all(axis=1)
    bbox = np.concatenate([begin - low, end - low], axis=1)[kept].astype(bbox.dtype)
    return (bbox, {"index": np.flatnonzero(kept), "truncated_index": None}) if return_param else bbox


# ---- overlap --------------------------------------------------------------------------------------------------------


def bbox_iou(bbox_a, bbox_b):
    """The area that two boxes share, divided by the area that they cover together: (N, K) for N and K boxes."""
    if bbox_a.shape[1] != 4 or bbox_b.shape[1] != 4:
        raise IndexError(f"expected boxes (N, 4), got shapes {bbox_a.shape} and {bbox_b.shape}")
    begin = np.maximum(bbox_a[:, None, :2], bbox_b[:, :2])
    end = np.minimum(bbox_a[:, None, 2:], bbox_b[:, 2:])
    shared = np.prod(end - begin, axis=2) * (begin < end).all(axis=2)
    area_a, area_b = (np.prod(b[:, 2:] - b[:, :2], axis=1) for b in (bbox_a, bbox_b))
    return shared / (area_a[:, None] + area_b - shared)


def non_maximum_suppression(bbox, thresh, score=None, limit=None):
    """The indices of boxes, best score first, that overlap no better one by ``thresh`` or more; at most ``limit``."""
    order = np.arange(len(bbox)) if score is None else np.argsort(-score, kind="stable")
    iou = bbox_iou(bbox, bbox) if len(bbox) else np.zeros((0, 0))
    kept = []
    for i in order:
        if limit is not None and len(kept) == limit:
            break
        if not (iou[i, kept] >= thresh).any():
            kept.append(i)
    return np.array(kept, np.int32)


# ---- evaluation -----------------------------------------------------------------------------------------------------


def calc_detection_voc_prec_rec(
    pred_bboxes, pred_labels, pred_scores, gt_bboxes, gt_labels, gt_difficults=None, iou_thresh=0.5
):
    """Precision and recall after each detection of a class, best score first: two lists by label, None without objects.

    A detection is right if the object of its label and image that it overlaps most, by ``iou_thresh`` at least, has not
    been found before. Difficult objects are not counted, and neither is what finds them.
    """
    difficults = [None] * len(gt_bboxes) if gt_difficults is None else gt_difficults
    number, scores, rights = {}, {}, {}
    for *pred, gt_bbox, gt_label, difficult in zip(
        pred_bboxes, pred_labels, pred_scores, gt_bboxes, gt_labels, difficults, strict=True
    ):
        bbox, label, score = pred
        difficult = np.zeros(len(gt_bbox), bool) if difficult is None else np.asarray(difficult, bool)
        for of in np.unique(np.concatenate([label, gt_label]).astype(int)):
            mine, theirs = label == of, gt_label == of
            order = np.argsort(-score[mine], kind="stable")
            number[of] = number.get(of, 0) + np.count_nonzero(~difficult[theirs])
            scores.setdefault(of, []).extend(score[mine][order])
            rights.setdefault(of, []).extend(
                _matches(bbox[mine][order], gt_bbox[theirs], difficult[theirs], iou_thresh)
            )
    size = max(number, default=-1) + 1
    precision, recall = [None] * size, [None] * size
    for of, count in number.items():
        right = np.array(rights[of], int)[np.argsort(-np.array(scores[of], float), kind="stable")]
        found, wrong = np.cumsum(right == 1), np.cumsum(right == 0)
        with np.errstate(invalid="ignore"):
            precision[of] = found / (found + wrong)
        if count > 0:
            recall[of] = found / count
    return precision, recall


def _matches(bbox, gt_bbox, difficult, thresh):
    """For each detection, best first: 1 if it is right, 0 if it is wrong, -1 if it does not count."""
    if not len(gt_bbox):
        return [0] * len(bbox)
    found, result = np.zeros(len(gt_bbox), bool), []
    # PASCAL VOC counts whole pixels: the last one belongs to the box
    grown, gt_grown = (b + np.array([0, 0, 1, 1], float) for b in (bbox.astype(float), gt_bbox.astype(float)))
    for overlap in bbox_iou(grown, gt_grown) if len(bbox) else ():
        best = overlap.argmax()
        if overlap[best] < thresh:
            result.append(0)
        elif difficult[best]:
            result.append(-1)
        else:
            result.append(int(not found[best]))
            found[best] = True
    return result


def calc_detection_voc_ap(prec, rec, use_07_metric=False):
    """Average precision by label: the area below the falling hull of precision over recall.

    ``use_07_metric``: the mean of that hull at recalls 0, 0.1, ..., 1 instead. NaN for a label without objects.
    """
    ap = np.full(len(prec), np.nan)
    for label, (p, r) in enumerate(zip(prec, rec)):
        if p is None or r is None:
            continue
        p = np.nan_to_num(p)
        if use_07_metric:
            ap[label] = np.mean([max(p[r >= t], default=0.0) for t in np.arange(0.0, 1.1, 0.1)])
            continue
        r, p = np.concatenate([[0.0], r, [1.0]]), np.concatenate([[0.0], p, [0.0]])
        hull = np.maximum.accumulate(p[::-1])[::-1]
        ap[label] = np.sum(np.diff(r) * hull[1:])
    return ap


def eval_detection_voc(
    pred_bboxes, pred_labels, pred_scores, gt_bboxes, gt_labels, gt_difficults=None, iou_thresh=0.5, use_07_metric=False
):
    """``{"ap": average precision by label, "map": their mean}``, as PASCAL VOC has it."""
    prec, rec = calc_detection_voc_prec_rec(
        pred_bboxes, pred_labels, pred_scores, gt_bboxes, gt_labels, gt_difficults, iou_thresh
    )
    ap = calc_detection_voc_ap(prec, rec, use_07_metric)
    return {"ap": ap, "map": np.nanmean(ap) if np.isfinite(ap).any() else np.nan}
