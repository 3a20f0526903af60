/* Loops of elementwise functions and their gradients: the result first. Included by vector_loops.h, which says what the
macros mean. */

LOOP(hard_sigmoid, OUT(0, y) IN(1, x), , {
    Real line = x[i] * (Real)0.2 + (Real)0.5;
    line = LARGER(line, 0);
    y[i] = SMALLER(line, 1);
})

LOOP(hard_sigmoid_gradient, OUT(0, gx) IN(1, x) IN(2, gy), , {
    Real moved = gy[i] * (Real)0.2;
    gx[i] = x[i] > (Real)-2.5 && x[i] < (Real)2.5 ? moved : 0;
})

#define HELD                            \
    Real a = x[i] - t[i];               \
    Real held = LARGER(a, -delta);      \
    held = SMALLER(held, delta);

LOOP(huber, OUT(0, y) IN(1, x) IN(2, t), NUMBER(0, delta), {
    HELD
    y[i] = held * (a - held * (Real)0.5);
})

LOOP(huber_gradient, OUT(0, gx) IN(1, x) IN(2, t) IN(3, gy), NUMBER(0, delta), {
    HELD
    gx[i] = gy[i] * held;
})

LOOP(distance, OUT(0, y) IN(1, a) IN(2, b), , {
    Real d = a[i] - b[i];
    y[i] = d < 0 ? -d : d == 0 ? 0 : d;
})

LOOP(distance_gradient, OUT(0, gx) IN(1, a) IN(2, b) IN(3, gy), , {
    Real d = a[i] - b[i];
    Real sign = d > 0 ? 1 : d < 0 ? -1 : d == 0 ? 0 : d;
    gx[i] = gy[i] * sign;
})

LOOP(clipped_gradient, OUT(0, gx) IN(1, x) IN(2, gy), NUMBER(0, high), {
    gx[i] = x[i] > 0 && x[i] < high ? gy[i] : 0;
})

LOOP(leaky_relu, OUT(0, y) IN(1, x), NUMBER(0, slope), {
    Real below = x[i] * slope;
    y[i] = LARGER(x[i], below);
})

LOOP(leaky_relu_gradient, OUT(0, gx) IN(1, x) IN(2, gy), NUMBER(0, slope), {
    Real below = gy[i] * slope;
    gx[i] = x[i] >= 0 ? gy[i] : below;
})

LOOP(hardswish, OUT(0, y) IN(1, x), , {
    Real gate = x[i] / 6 + (Real)0.5;
    gate = LARGER(gate, 0);
    y[i] = x[i] * SMALLER(gate, 1);
})

LOOP(hardswish_gradient, OUT(0, gx) IN(1, x) IN(2, gy), , {
    Real inside = gy[i] * (x[i] / 3 + (Real)0.5);
    Real outside = x[i] <= -3 ? 0 : gy[i];
    gx[i] = x[i] > -3 && x[i] < 3 ? inside : outside;
})

/* What passes a ReLU backwards: gy where its output is not 0, else a zero with the sign of gy, as from a product. */
#define PASSED(y, gy) ((y) != 0 ? (gy) : ZERO_OF(gy))
#define ZERO_OF(x) (sizeof(Real) == sizeof(float) ? (Real)copysignf(0, (float)(x)) : (Real)copysign(0, (double)(x)))

LOOP(relu_backward, OUT(0, gx) IN(1, y) IN(2, gy), , gx[i] = PASSED(y[i], gy[i]);)

LOOP(relu_backward_over, OUT(0, gy) IN(1, y), , gy[i] = PASSED(y[i], gy[i]);)

LOOP(relu_backward_of_sum, OUT(0, gx) IN(1, y) IN(2, a) IN(3, b), , {
    Real sum = a[i] + b[i];
    gx[i] = PASSED(y[i], sum);
})

LOOP(relu_backward_of_sum_over, OUT(0, a) IN(1, y) IN(2, b), , {
    Real sum = a[i] + b[i];
    a[i] = PASSED(y[i], sum);
})

/* ---- of float alone: what takes exponentials or logarithms, by elementary.h */

FLOAT_LOOP(sigmoid, OUT(0, y) IN(1, x), , y[i] = sigmoid_of(x[i]);)

FLOAT_LOOP(sigmoid_gradient, OUT(0, gx) IN(1, y) IN(2, gy), , gx[i] = gy[i] * (y[i] * (1.0f - y[i]));)

FLOAT_LOOP(silu, OUT(0, y) IN(1, x), NUMBER(0, beta), y[i] = x[i] * sigmoid_of(x[i] * beta);)

FLOAT_LOOP(silu_gradient, OUT(0, gx) IN(1, x) IN(2, gy), NUMBER(0, beta), {
    float z = x[i] * beta, s = sigmoid_of(z);
    gx[i] = gy[i] * (s * (z * (1.0f - s) + 1.0f));
})

FLOAT_LOOP(softplus, OUT(0, y) IN(1, x), NUMBER(0, beta), {
    float above = LARGER(x[i], 0.0f);
    y[i] = above + softplus_rest(x[i] * beta) / beta;
})

FLOAT_LOOP(softplus_gradient, OUT(0, gx) IN(1, x) IN(2, gy), NUMBER(0, beta), gx[i] = gy[i] * sigmoid_of(x[i] * beta);)

FLOAT_LOOP(bernoulli, OUT(0, y) IN(1, p) IN(2, x), , {
    float above = LARGER(x[i], 0.0f);
    y[i] = above - x[i] * p[i] + softplus_rest(x[i]);
})

FLOAT_LOOP(bernoulli_gradient, OUT(0, gx) IN(1, p) IN(2, x) IN(3, gy), , gx[i] = gy[i] * (sigmoid_of(x[i]) - p[i]);)

/* scale times x, and below 0 times alpha (exp(x) - 1) */
FLOAT_LOOP(elu, OUT(0, y) IN(1, x), NUMBER(0, alpha) NUMBER(1, scale), {
    float below = expm1_below_0(SMALLER(x[i], 0.0f)) * alpha;
    y[i] = (x[i] > 0.0f ? x[i] : below) * scale;
})

FLOAT_LOOP(elu_gradient, OUT(0, gx) IN(1, x) IN(2, gy), NUMBER(0, alpha) NUMBER(1, scale), {
    float below = exp_of(SMALLER(x[i], 0.0f)) * alpha;
    gx[i] = gy[i] * ((x[i] >= 0.0f ? 1.0f : below) * scale);
})

FLOAT_LOOP(gelu, OUT(0, y) IN(1, x), , y[i] = x[i] * ndtr_of(x[i]);)

#define NORMAL_HEIGHT 0.398942280f

FLOAT_LOOP(gelu_gradient, OUT(0, gx) IN(1, x) IN(2, gy), , {
    float bell = bell_of(x[i], 0.5f), tail = erfc_ratio(fabsf(x[i]) * 0.707106781f) * bell;
    float below = x[i] < 0.0f ? tail : 1.0f - tail;
    gx[i] = gy[i] * (below + x[i] * (bell * NORMAL_HEIGHT));
})

FLOAT_LOOP(ndtr, OUT(0, y) IN(1, x), , y[i] = ndtr_of(x[i]);)

FLOAT_LOOP(erf, OUT(0, y) IN(1, x), , {
    float half = half_erfc_of_size(x[i]), far = 1.0f - 2.0f * half;
    float near = erf_near_0(x[i]);
    y[i] = x[i] > -1.0f && x[i] < 1.0f ? near : copysignf(far, x[i]);
})

FLOAT_LOOP(erfc, OUT(0, y) IN(1, x), , {
    float tail = 2.0f * half_erfc_of_size(x[i]), near = 1.0f - erf_near_0(x[i]);
    float far = x[i] < 0.0f ? 2.0f - tail : tail;
    y[i] = x[i] > -0.5f && x[i] < 0.5f ? near : far;
})

/* height exp(-c x^2) gy */
FLOAT_LOOP(bell_gradient, OUT(0, gx) IN(1, x) IN(2, gy), NUMBER(0, c) NUMBER(1, height), {
    gx[i] = gy[i] * (bell_of(x[i], c) * height);
})
