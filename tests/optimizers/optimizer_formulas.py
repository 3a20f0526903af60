"""The update rules element by element as in the papers, in plain NumPy, and the optimizers that they are compared with.

A formula takes the parameter ``w``, its gradient ``g``, its state ``s`` and the number of the update ``t``, from 1 on.
"""

from __future__ import annotations

import math

import numpy as np

from dbrdist.optimizers import (
    LAMB,
    LARS,
    MSVAG,
    SGD,
    SMORMS3,
    AdaBound,
    AdaDelta,
    AdaGrad,
    Adam,
    AdamW,
    AMSBound,
    AMSGrad,
    CorrectedLARS,
    CorrectedMomentumSGD,
    CorrectedNesterovAG,
    MomentumSGD,
    NesterovAG,
    RMSprop,
    RMSpropGraves,
    RMSpropWarmup,
)


def sgd(w, g, s, t, lr):
    return w - lr * g


def momentum(w, g, s, t, lr, mu):
    s["v"] = mu * s.get("v", 0) - lr * g
    return w + s["v"]


def corrected(w, g, s, t, lr, mu):
    s["u"] = mu * s.get("u", 0) + g
    return w - lr * s["u"]


def nesterov(w, g, s, t, lr, mu):
    """With the gradient taken at w: w' = w + mu v' - lr g (Bengio et al. 2013, equation 7)."""
    old = s.get("v", 0)
    s["v"] = mu * old - lr * g
    return w + mu * mu * old - (1 + mu) * lr * g


def corrected_nesterov(w, g, s, t, lr, mu):
    """As in PyTorch: buf = mu buf + g; the step is lr (g + mu buf)."""
    s["u"] = mu * s.get("u", 0) + g
    return w - lr * (g + mu * s["u"])


def adam(w, g, s, t, alpha=0.001, b1=0.9, b2=0.999, eps=1e-8, eta=1.0, wd=0.0):
    s["m"] = b1 * s.get("m", 0) + (1 - b1) * g
    s["v"] = b2 * s.get("v", 0) + (1 - b2) * g * g
    rate = alpha * math.sqrt(1 - b2**t) / (1 - b1**t)
    return w - eta * (rate * s["m"] / (np.sqrt(s["v"]) + eps) + wd * w)


def amsgrad(w, g, s, t, alpha=0.001, b1=0.9, b2=0.999, eps=1e-8, eta=1.0, wd=0.0):
    """Reddi et al. 2018, algorithm 2, with Adam's corrected rate."""
    s["m"] = b1 * s.get("m", 0) + (1 - b1) * g
    s.setdefault("all v", []).append(b2 * (s["all v"][-1] if t > 1 else 0) + (1 - b2) * g * g)
    rate = alpha * math.sqrt(1 - b2**t) / (1 - b1**t)
    return w - eta * (rate * s["m"] / (np.sqrt(np.max(s["all v"], axis=0)) + eps) + wd * w)


def adabound(w, g, s, t, alpha=0.001, b1=0.9, b2=0.999, final=0.1, gamma=0.001, eps=1e-8, eta=1.0, wd=0.0, ams=False):
    """Luo et al. 2019, algorithms 2 and 3, with Adam's corrected rate."""
    s["m"] = b1 * s.get("m", 0) + (1 - b1) * g
    s["v"] = b2 * s.get("v", 0) + (1 - b2) * g * g
    s["top"] = np.where(s["v"] > s.get("top", 0), s["v"], s.get("top", 0)) if ams else s["v"]
    rate = alpha * math.sqrt(1 - b2**t) / (1 - b1**t) / (np.sqrt(s["top"]) + eps)
    lower, upper = final * (1 - 1 / (gamma * t + 1)), final * (1 + 1 / (gamma * t))
    rate = np.where(rate < lower, lower, np.where(rate > upper, upper, rate))
    return w - eta * (rate * s["m"] + wd * w)


def lars(w, g, s, t, lr=0.1, mu=0.9, wd=1e-4, eta=0.001):
    ratio = 1.0
    if w.ndim > 1:
        ratio = eta * np.linalg.norm(w) / (np.linalg.norm(g) + wd * np.linalg.norm(w))
        g = g + wd * w
    s["v"] = mu * s.get("v", 0) + ratio * lr * g
    return w - s["v"]


def corrected_lars(w, g, s, t, lr=0.1, mu=0.9, wd=1e-4, eta=0.001):
    """With one lr throughout both forms are the same."""
    return lars(w, g, s, t, lr, mu, wd, eta)


def rmsprop_warmup(w, g, s, t, lr=0.1, mu=0.9, alpha=0.99, eps=1e-8, rms=3e-4, a=1.0):
    """Akiba et al. 2017."""
    s["m"] = alpha * s.get("m", 0) + (1 - alpha) * g**2
    s["D"] = mu * s.get("D", 0) - (a + (1 - a) * rms / lr / (np.sqrt(s["m"]) + eps)) * g
    return w + lr * s["D"]


def lamb(w, g, s, t, alpha=0.001, b1=0.9, b2=0.999, eps=1e-6, wd=0.01, skip=True):
    """You et al. 2020, algorithm 2."""
    s["m"] = b1 * s.get("m", 0) + (1 - b1) * g
    s["v"] = b2 * s.get("v", 0) + (1 - b2) * g * g
    r = s["m"] / (1 - b1**t) / (np.sqrt(s["v"] / (1 - b2**t)) + eps)
    if skip and w.ndim < 2:
        return w - alpha * r
    u = r + wd * w
    return w - alpha * math.sqrt((w * w).sum() / (u * u).sum()) * u


def adagrad(w, g, s, t, lr=0.001, eps=1e-8):
    s.setdefault("gs", []).append(g)
    return w - lr * g / (np.sqrt(sum(x * x for x in s["gs"])) + eps)


def adadelta(w, g, s, t, rho=0.95, eps=1e-6):
    """Zeiler 2012, algorithm 1: RMS[x] = sqrt(E[x^2] + eps)."""
    s["Eg"] = rho * s.get("Eg", 0) + (1 - rho) * g**2
    dx = -np.sqrt(s.get("Ex", 0) + eps) / np.sqrt(s["Eg"] + eps) * g
    s["Ex"] = rho * s.get("Ex", 0) + (1 - rho) * dx**2
    return w + dx


def rmsprop(w, g, s, t, lr=0.01, alpha=0.99, eps=1e-8, inside=False):
    s["ms"] = alpha * s.get("ms", 0) + (1 - alpha) * g**2
    return w - lr * g / (np.sqrt(s["ms"] + eps) if inside else np.sqrt(s["ms"]) + eps)


def graves(w, g, s, t, lr=1e-4, alpha=0.95, mu=0.9, eps=1e-4):
    """Graves 2013, equations 38 to 41."""
    s["n"] = alpha * s.get("n", 0) + (1 - alpha) * g**2
    s["g"] = alpha * s.get("g", 0) + (1 - alpha) * g
    s["d"] = mu * s.get("d", 0) - lr * g / np.sqrt(s["n"] - s["g"] ** 2 + eps)
    return w + s["d"]


def smorms3(w, g, s, t, lr=0.001, eps=1e-16):
    """Funk 2015: ``mem`` begins at 1."""
    mem = s.get("mem", 1.0)
    r = 1 / (mem + 1)
    s["g"] = (1 - r) * s.get("g", 0) + r * g
    s["g2"] = (1 - r) * s.get("g2", 0) + r * g * g
    x = s["g"] ** 2 / (s["g2"] + eps)
    s["mem"] = 1 + mem * (1 - x)
    return w - g * np.minimum(lr, x) / (np.sqrt(s["g2"]) + eps)


def msvag(w, g, s, t, lr=0.1, beta=0.9, eta=1.0, wd=0.0):
    """Balles and Hennig 2018, section 4 and algorithm 3, from all gradients so far and their weights."""
    s.setdefault("gs", []).append(g)
    weights = np.array([(1 - beta) * beta ** (t - 1 - i) for i in range(t)]) / (1 - beta**t)
    m = sum(c * x for c, x in zip(weights, s["gs"]))
    rho = (weights**2).sum()
    variance = 0.0
    if t > 1:
        variance = sum(c * (x - m) ** 2 for c, x in zip(weights, s["gs"])) / (1 - rho)
    return w - eta * (lr * m**3 / (m**2 + rho * variance) + wd * w)


CASES = [
    (lambda: SGD(lr=0.1), lambda *a: sgd(*a, 0.1)),
    (lambda: MomentumSGD(lr=0.1, momentum=0.8), lambda *a: momentum(*a, 0.1, 0.8)),
    (lambda: CorrectedMomentumSGD(lr=0.1, momentum=0.8), lambda *a: corrected(*a, 0.1, 0.8)),
    (lambda: NesterovAG(lr=0.1, momentum=0.8), lambda *a: nesterov(*a, 0.1, 0.8)),
    (lambda: CorrectedNesterovAG(lr=0.1, momentum=0.8), lambda *a: corrected_nesterov(*a, 0.1, 0.8)),
    (lambda: Adam(), adam),
    (lambda: Adam(0.01, 0.8, 0.95, 1e-3, 0.5, 0.1), lambda *a: adam(*a, 0.01, 0.8, 0.95, 1e-3, 0.5, 0.1)),
    (lambda: AdamW(alpha=0.01, weight_decay_rate=0.01), lambda *a: adam(*a, alpha=0.01, wd=0.01)),
    (lambda: AMSGrad(), amsgrad),
    (lambda: AMSGrad(0.01, 0.8, 0.6, 1e-3, 0.5), lambda *a: amsgrad(*a, 0.01, 0.8, 0.6, 1e-3, 0.5)),
    (
        lambda: Adam(0.01, beta2=0.6, weight_decay_rate=0.1, amsgrad=True),
        lambda *a: amsgrad(*a, 0.01, b2=0.6, wd=0.1),
    ),
    (lambda: AdaBound(), adabound),
    (
        lambda: AdaBound(0.05, 0.8, 0.6, 0.03, 0.5, 1e-3, 0.5),
        lambda *a: adabound(*a, 0.05, 0.8, 0.6, 0.03, 0.5, 1e-3, 0.5),
    ),
    (
        lambda: AMSBound(0.05, 0.8, 0.6, 0.03, 0.5, 1e-3, 0.5),
        lambda *a: adabound(*a, 0.05, 0.8, 0.6, 0.03, 0.5, 1e-3, 0.5, ams=True),
    ),
    (
        lambda: Adam(0.05, weight_decay_rate=0.1, adabound=True, final_lr=0.02, gamma=0.25),
        lambda *a: adabound(*a, 0.05, final=0.02, gamma=0.25, wd=0.1),
    ),
    (lambda: LARS(), lars),
    (lambda: LARS(lr=0.5, weight_decay=0.1), lambda *a: lars(*a, lr=0.5, wd=0.1)),
    (lambda: CorrectedLARS(), corrected_lars),
    (lambda: CorrectedLARS(0.5, 0.8, 0.1, 0.01), lambda *a: corrected_lars(*a, lr=0.5, mu=0.8, wd=0.1, eta=0.01)),
    (lambda: RMSpropWarmup(), rmsprop_warmup),
    (
        lambda: RMSpropWarmup(0.5, 0.8, 0.6, 1e-2, 0.1, 0.25),
        lambda *a: rmsprop_warmup(*a, 0.5, 0.8, 0.6, 1e-2, 0.1, 0.25),
    ),
    (lambda: RMSpropWarmup(0.5, a_sgd=1.3), lambda *a: rmsprop_warmup(*a, 0.5, a=1.3)),
    (lambda: LAMB(), lamb),
    (lambda: LAMB(0.01, 0.8, 0.6, 1e-2, 0.2, False), lambda *a: lamb(*a, 0.01, 0.8, 0.6, 1e-2, 0.2, False)),
    (lambda: AdaGrad(), adagrad),
    (lambda: AdaGrad(0.1, 0.01), lambda *a: adagrad(*a, 0.1, 0.01)),
    (lambda: AdaDelta(), adadelta),
    (lambda: AdaDelta(0.8, 1e-3), lambda *a: adadelta(*a, 0.8, 1e-3)),
    (lambda: RMSprop(), rmsprop),
    (lambda: RMSprop(0.02, 0.8, 0.1), lambda *a: rmsprop(*a, 0.02, 0.8, 0.1)),
    (lambda: RMSprop(0.02, 0.8, 0.1, True), lambda *a: rmsprop(*a, 0.02, 0.8, 0.1, True)),
    (lambda: RMSpropGraves(), graves),
    (lambda: RMSpropGraves(0.01, 0.8, 0.5, 0.1), lambda *a: graves(*a, 0.01, 0.8, 0.5, 0.1)),
    (lambda: SMORMS3(), smorms3),
    (lambda: SMORMS3(0.1, 0.01), lambda *a: smorms3(*a, 0.1, 0.01)),
    (lambda: MSVAG(0.01), lambda *a: msvag(*a, 0.01)),
    (lambda: MSVAG(0.02, 0.7, 0.5, 0.1), lambda *a: msvag(*a, 0.02, 0.7, 0.5, 0.1)),
]
