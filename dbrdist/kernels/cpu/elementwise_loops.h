/* Loops of elementwise functions and their gradients: the result first. Included by vector_loops.h, which says what the
macros mean. */

LOOP(hard_sigmoid, OUT(0, y) IN(1, x), , {
    Real line = x[i] * (Real)0.2 + (Real)0.5;
    line = AT_LEAST(0, line);
    y[i] = AT_MOST(1, line);
})

LOOP(hard_sigmoid_gradient, OUT(0, gx) IN(1, x) IN(2, gy), , {
    Real moved = gy[i] * (Real)0.2;
    gx[i] = x[i] > (Real)-2.5 && x[i] < (Real)2.5 ? moved : 0;
})

#define HELD                            \
    Real a = x[i] - t[i];               \
    Real held = AT_LEAST(-delta, a);      \
    held = AT_MOST(delta, held);

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

LOOP(absolute_gradient, OUT(0, gx) IN(1, x) IN(2, gy), , {
    Real sign = x[i] > 0 ? 1 : x[i] < 0 ? -1 : x[i] == 0 ? 0 : x[i];
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
    Real gate = x[i] * (Real)(1.0 / 6) + (Real)0.5;
    gate = AT_LEAST(0, gate);
    y[i] = x[i] * AT_MOST(1, gate);
})

LOOP(hardswish_gradient, OUT(0, gx) IN(1, x) IN(2, gy), , {
    Real inside = gy[i] * (x[i] * (Real)(1.0 / 3) + (Real)0.5);
    Real outside = x[i] <= -3 ? 0 : gy[i];
    gx[i] = x[i] > -3 && x[i] < 3 ? inside : outside;
})

/* As np.maximum with 0: no zero has a sign, and NaN stays. */
#define RECTIFIED(x) ((x) > 0 || (x) != (x) ? (x) : 0)
LOOP(relu_forward, OUT(0, y) IN(1, x), , y[i] = RECTIFIED(x[i]);)

LOOP(relu_of_sum_over, OUT(0, a) IN(1, b), , {
    Real sum = a[i] + b[i];
    a[i] = RECTIFIED(sum);
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

/* gy times the derivative of 1 / x */
LOOP(reciprocal_gradient, OUT(0, gx) IN(1, x) IN(2, gy), , {
    Real r = 1 / x[i];
    gx[i] = gy[i] * -(r * r);
})

LOOP(root, OUT(0, y) IN(1, x), , y[i] = ROOT(x[i]);)

LOOP(square, OUT(0, y) IN(1, x), , y[i] = x[i] * x[i];)

/* gy times the derivative of the square root */
LOOP(root_gradient, OUT(0, gx) IN(1, x) IN(2, gy), , {
    Real slope = (Real)0.5 / ROOT(x[i]);
    gx[i] = gy[i] * slope;
})

/* gy times the derivative of the square */
FLOAT_LOOP(square_gradient, OUT(0, gx) IN(1, x) IN(2, gy), , gx[i] = (x[i] * 2.0f) * gy[i];)

LOOP(interpolated, OUT(0, out) IN(1, p) IN(2, x) IN(3, y), , out[i] = p[i] * x[i] + (1 - p[i]) * y[i];)

LOOP(interpolated_gradients, OUT(0, gp) OUT(1, gx) OUT(2, gy) IN(3, p) IN(4, x) IN(5, y) IN(6, gout), NOTHING_OVERLAPS, {
    gp[i] = gout[i] * (x[i] - y[i]);
    gx[i] = gout[i] * p[i];
    gy[i] = gout[i] * (1 - p[i]);
})

/* of the mean y of x with weights w; share is gy over the sum of the weights */
LOOP(weighted_mean_gradients, OUT(0, gx) OUT(1, gw) IN(2, x) IN(3, w) IN(4, y) IN(5, share), NOTHING_OVERLAPS, {
    gx[i] = w[i] * share[i];
    gw[i] = (x[i] - y[i]) * share[i];
})

/* ---- sums of several arrays in order, to another array or over the first */

LOOP(sum_of_2, OUT(0, y) IN(1, a) IN(2, b), , y[i] = a[i] + b[i];)
LOOP(sum_of_3, OUT(0, y) IN(1, a) IN(2, b) IN(3, c), , y[i] = a[i] + b[i] + c[i];)
LOOP(sum_of_4, OUT(0, y) IN(1, a) IN(2, b) IN(3, c) IN(4, d), , y[i] = a[i] + b[i] + c[i] + d[i];)
LOOP(sum_of_2_over, OUT(0, a) IN(1, b), , a[i] = a[i] + b[i];)
LOOP(sum_of_3_over, OUT(0, a) IN(1, b) IN(2, c), , a[i] = a[i] + b[i] + c[i];)
LOOP(sum_of_4_over, OUT(0, a) IN(1, b) IN(2, c) IN(3, d), , a[i] = a[i] + b[i] + c[i] + d[i];)

/* ---- of float alone: what takes exponentials or logarithms, by elementary.h */

FLOAT_LOOP(sigmoid, OUT(0, y) IN(1, x), , y[i] = sigmoid_of(x[i]);)

FLOAT_LOOP(sigmoid_gradient, OUT(0, gx) IN(1, y) IN(2, gy), , gx[i] = gy[i] * (y[i] * (1.0f - y[i]));)

FLOAT_LOOP(silu, OUT(0, y) IN(1, x), NUMBER(0, beta), y[i] = x[i] * sigmoid_of(x[i] * beta);)

FLOAT_LOOP(silu_gradient, OUT(0, gx) IN(1, x) IN(2, gy), NUMBER(0, beta), {
    float z = x[i] * beta, s = sigmoid_of(z);
    gx[i] = gy[i] * (s * (z * (1.0f - s) + 1.0f));
})

FLOAT_LOOP(softplus, OUT(0, y) IN(1, x), NUMBER(0, beta), {
    float above = AT_LEAST(0.0f, x[i]);
    y[i] = above + softplus_rest(x[i] * beta) / beta;
})

FLOAT_LOOP(softplus_gradient, OUT(0, gx) IN(1, x) IN(2, gy), NUMBER(0, beta), gx[i] = gy[i] * sigmoid_of(x[i] * beta);)

FLOAT_LOOP(bernoulli, OUT(0, y) IN(1, p) IN(2, x), , {
    float above = AT_LEAST(0.0f, x[i]);
    y[i] = above - x[i] * p[i] + softplus_rest(x[i]);
})

/* sigmoid(x) - p; above 0 as 1 - p less sigmoid(-x), which keeps its digits where p is 1 */
FLOAT_LOOP(bernoulli_gradient, OUT(0, gx) IN(1, p) IN(2, x) IN(3, gy), , {
    float tail = sigmoid_of(-fabsf(x[i]));
    gx[i] = gy[i] * chosen(x[i] > 0.0f, (1.0f - p[i]) - tail, tail - p[i]);
})

/* scale times x, and below 0 times alpha (exp(x) - 1) */
FLOAT_LOOP(elu, OUT(0, y) IN(1, x), NUMBER(0, alpha) NUMBER(1, scale), {
    float below = expm1_below_0(AT_MOST(0.0f, x[i])) * alpha;
    y[i] = chosen(x[i] > 0.0f, x[i], below) * scale;
})

FLOAT_LOOP(elu_gradient, OUT(0, gx) IN(1, x) IN(2, gy), NUMBER(0, alpha) NUMBER(1, scale), {
    float below = exp_of(AT_MOST(0.0f, x[i])) * alpha;
    gx[i] = gy[i] * (chosen(x[i] >= 0.0f, 1.0f, below) * scale);
})

FLOAT_LOOP(gelu, OUT(0, y) IN(1, x), , y[i] = x[i] * ndtr_of(x[i]);)

#define NORMAL_HEIGHT 0.398942280f

FLOAT_LOOP(gelu_gradient, OUT(0, gx) IN(1, x) IN(2, gy), , {
    float bell = bell_of(x[i], 0.5f), tail = erfc_ratio(fabsf(x[i]) * 0.707106781f) * bell;
    float below = chosen(x[i] < 0.0f, tail, 1.0f - tail);
    gx[i] = gy[i] * (below + x[i] * (bell * NORMAL_HEIGHT));
})

FLOAT_LOOP(ndtr, OUT(0, y) IN(1, x), , y[i] = ndtr_of(x[i]);)

FLOAT_LOOP(erf, OUT(0, y) IN(1, x), , {
    float half = half_erfc_of_size(x[i]), far = 1.0f - 2.0f * half;
    float near = erf_near_0(x[i]);
    y[i] = chosen((x[i] > -1.0f) & (x[i] < 1.0f), near, copysignf(far, x[i]));
})

FLOAT_LOOP(erfc, OUT(0, y) IN(1, x), , {
    float tail = 2.0f * half_erfc_of_size(x[i]), near = 1.0f - erf_near_0(x[i]);
    float far = chosen(x[i] < 0.0f, 2.0f - tail, tail);
    y[i] = chosen((x[i] > -0.5f) & (x[i] < 0.5f), near, far);
})

/* height exp(-c x^2) gy */
FLOAT_LOOP(bell_gradient, OUT(0, gx) IN(1, x) IN(2, gy), NUMBER(0, c) NUMBER(1, height), {
    gx[i] = gy[i] * (bell_of(x[i], c) * height);
})

/* ---- of float alone, computed in double by special.h. NaN stands for what a loop leaves to the reference, beside the NaN
that come from NaN. */

#define WHERE(holds, y) chosen(holds, (float)(y), NAN)

FLOAT_LOOP(erfinv, OUT(0, y) IN(1, x), , {
    double a = x[i], inverse = inverse_erf(a);
    y[i] = WHERE((a > -1.0) & (a < 1.0), inverse);
})

/* scale times the inverse of the normal distribution's function at p = share x, without the square root of 2 */
FLOAT_LOOP(normal_quantile, OUT(0, y) IN(1, x), NUMBER(0, share) NUMBER(1, scale) const double factor = numbers[1];, {
    double p = (double)x[i] * share, inverse = inverse_normal(p) * factor;
    (void)scale;
    y[i] = WHERE((p > 0.0) & (p < 1.0), inverse);
})

/* height exp(rate y^2) gy */
FLOAT_LOOP(rising_bell_gradient, OUT(0, gx) IN(1, y) IN(2, gy), NUMBER(0, rate) const double height = numbers[1];, {
    double a = y[i], bell = height * wide_exp(rate * (a * a));
    gx[i] = gy[i] * WHERE(a == a, bell);
})

FLOAT_LOOP(erfcx, OUT(0, y) IN(1, x), , {
    double a = x[i], of_size = wide_erfcx(fabs(a)), below = 2.0 * wide_exp(a * a) - of_size;
    y[i] = WHERE(a == a, wide_chosen(a < 0.0, below, of_size));
})

FLOAT_LOOP(log_ndtr, OUT(0, y) IN(1, x), , {
    double a = x[i], half = wide_erfcx(fabs(a) * 0.70710678118654752) * 0.5, square = a * a * 0.5;
    double below = wide_log(half) - square, above = wide_log1p(-half * wide_exp(-square));
    y[i] = WHERE(a == a, wide_chosen(a < 0.0, below, above));
})

/* The density of a normal number divided by ndtr: the derivative of log_ndtr */
FLOAT_LOOP(log_ndtr_gradient, OUT(0, gx) IN(1, x) IN(2, gy), , {
    double a = x[i], half = wide_erfcx(fabs(a) * 0.70710678118654752) * 0.5, bell = wide_exp(a * a * -0.5);
    double above = bell / (1.0 - half * bell), below = 1.0 / half;
    gx[i] = gy[i] * WHERE(a == a, wide_chosen(a < 0.0, below, above) * 0.39894228040143268);
})

#define IS_POSITIVE(x) (((x) > 0.0f) & ((x) < INFINITY))

FLOAT_LOOP(lgamma_of_positive, OUT(0, y) IN(1, x), , y[i] = WHERE(IS_POSITIVE(x[i]), wide_lgamma(x[i]));)

FLOAT_LOOP(digamma, OUT(0, y) IN(1, x), , y[i] = WHERE(IS_POSITIVE(x[i]), wide_digamma(x[i]));)

FLOAT_LOOP(digamma_product, OUT(0, gx) IN(1, x) IN(2, gy), , gx[i] = gy[i] * WHERE(IS_POSITIVE(x[i]), wide_digamma(x[i]));)

FLOAT_LOOP(trigamma_product, OUT(0, gx) IN(1, x) IN(2, gy), , gx[i] = gy[i] * WHERE(IS_POSITIVE(x[i]), wide_trigamma(x[i]));)

/* What is left of x when the whole multiples of d are taken away, as long as they are few enough for each step to be
exact: a product of 24 and 29 bits, and a difference of multiples of d's last bit that is no larger than d. */
#define REMAINDER                                                                  \
    double a = x[i], b = d[i], times = trunc(a / b), rest = a - times * b;         \
    int is_exact = (times > -536870912.0) & (times < 536870912.0) & (b != 0.0);        \
    float left = copysignf((float)rest, x[i]);

FLOAT_LOOP(fmod, OUT(0, y) IN(1, x) IN(2, d), , {
    REMAINDER
    y[i] = WHERE(is_exact, left);
})

/* with the sign of d */
FLOAT_LOOP(remainder, OUT(0, y) IN(1, x) IN(2, d), , {
    REMAINDER
    float moved = chosen((left < 0.0f) != (d[i] < 0.0f), left + d[i], left);
    y[i] = WHERE(is_exact, chosen(left != 0.0f, moved, copysignf(0.0f, d[i])));
})

/* Normal numbers from 32 random bits twice, which stand in arrays of float: sqrt(-2 ln u) cos(pi v) for u from 0 to 1 and
v from -1 to 1 (Box and Muller 1958) */
FLOAT_LOOP(box_muller, OUT(0, y) IN(1, radius_bits) IN(2, angle_bits), , {
    double u = ((double)bits_of(radius_bits[i]) + 0.5) * 2.3283064365386963e-10;
    double v = ((double)(int32_t)bits_of(angle_bits[i]) + 0.5) * 4.6566128730773926e-10;
    y[i] = (float)(sqrt(-2.0 * wide_log(u)) * cos_of_half_turns(v));
})

/* ---- losses of several operands; what ends in gradients writes one of each operand */

#define LN_2_PI 1.83787707f
FLOAT_LOOP(gaussian_nll, OUT(0, y) IN(1, x) IN(2, mean) IN(3, ln_var), , {
    float d = x[i] - mean[i];
    y[i] = ((d * d) * 0.5f) * exp_of(-ln_var[i]) + (ln_var[i] + LN_2_PI) * 0.5f;
})

FLOAT_LOOP(gaussian_nll_gradients,
           OUT(0, gx) OUT(1, gmean) OUT(2, gln_var) IN(3, x) IN(4, mean) IN(5, ln_var) IN(6, gy), NOTHING_OVERLAPS, {
    float d = x[i] - mean[i], e = exp_of(-ln_var[i]);
    float slope = gy[i] * (d * e);
    gx[i] = slope;
    gmean[i] = -slope;
    gln_var[i] = gy[i] * (0.5f - ((d * d) * 0.5f) * e);
})

#define LN_2 0.693147182f
#define SIGN_OF(x) ((x) != (x) ? (x) : (float)(((x) > 0.0f) - ((x) < 0.0f)))
FLOAT_LOOP(laplace_nll, OUT(0, y) IN(1, x) IN(2, loc) IN(3, ln_scale), , {
    y[i] = fabsf(x[i] - loc[i]) * exp_of(-ln_scale[i]) + ln_scale[i] + LN_2;
})

FLOAT_LOOP(laplace_nll_gradients,
           OUT(0, gx) OUT(1, gloc) OUT(2, gln_scale) IN(3, x) IN(4, loc) IN(5, ln_scale) IN(6, gy), NOTHING_OVERLAPS, {
    float d = x[i] - loc[i], e = exp_of(-ln_scale[i]);
    float slope = gy[i] * (SIGN_OF(d) * e);
    gx[i] = slope;
    gloc[i] = -slope;
    gln_scale[i] = gy[i] * (1.0f - fabsf(d) * e);
})

/* -q^gamma ln p with p the probability of the label t, 0, 1 or -1 for none, and q = 1 - p; times the label's weight */
#define FOCAL_NUMBERS NUMBER(0, gamma) NUMBER(1, of_ones) NUMBER(2, of_zeros)
#define FOCAL_PARTS                                                                        \
    float sign = t[i] == 1.0f ? 1.0f : -1.0f;                                              \
    float score = x[i] * sign;                                                             \
    float rest = softplus_rest(score);                                                     \
    float minus_ln_p = AT_LEAST(0.0f, -score) + rest;                                        \
    float power = exp_of((AT_LEAST(0.0f, score) + rest) * -gamma);                           \
    float weight = t[i] == 1.0f ? of_ones : of_zeros;

FLOAT_LOOP(focal_loss, OUT(0, y) IN(1, x) IN(2, t), FOCAL_NUMBERS, {
    FOCAL_PARTS
    y[i] = chosen(t[i] == -1.0f, 0.0f, (minus_ln_p * power) * weight);
})

FLOAT_LOOP(focal_loss_gradient, OUT(0, gx) IN(1, x) IN(2, t) IN(3, gy), FOCAL_NUMBERS, {
    FOCAL_PARTS
    float inner = sigmoid_of(score) * -minus_ln_p * gamma - sigmoid_of(-score);
    gx[i] = gy[i] * chosen(t[i] == -1.0f, 0.0f, (power * inner) * (sign * weight));
})
