/* Special functions of float, computed in double: their errors stay below a unit in the last place of float. As in
elementary.h, there are no branches, a result depends on no processor, and the polynomials are fits (by Chebyshev's, to
40 digits of the functions that stand beside them) with relative errors of 4e-9 at most. The caller looks after NaN. */

INSIDE double double_of(uint64_t bits) {
    double x;
    memcpy(&x, &bits, 8);
    return x;
}

INSIDE uint64_t wide_bits_of(double x) {
    uint64_t bits;
    memcpy(&bits, &x, 8);
    return bits;
}

INSIDE double wide_chosen(int holds, double a, double b) {
    uint64_t mask = (uint64_t)-(int64_t)holds;
    return double_of((wide_bits_of(a) & mask) | (wide_bits_of(b) & ~mask));
}

#define WIDE_SHIFT 6755399441055744.0 /* 1.5 * 2^52: what is added to it becomes an integer in the low bits */
#define WIDE_LN_2 0.69314718055994531
#define ROOT_OF_HALF_BITS 0x3fe6a09e667f3bcdull
#define ONE_BITS 0x3ff0000000000000ull

/* exp(r) for |r| <= 0.35 */
INSIDE double exp_near_0(double r) {
    double q = 1.991737114914e-4;
    q = fma(q, r, 1.394978292335e-3);
    q = fma(q, r, 8.333263359949e-3);
    q = fma(q, r, 4.166620004442e-2);
    q = fma(q, r, 1.666666690489e-1);
    q = fma(q, r, 5.000000114385e-1);
    q = fma(q, r, 9.999999999781e-1);
    return fma(q, r, 9.999999999562e-1);
}

/* exp(x); at both ends the smallest and the largest number, which float takes for 0 and infinity */
INSIDE double wide_exp(double x) {
    x = x > 709.0 ? 709.0 : x;
    x = x < -708.0 ? -708.0 : x;
    double shifted = fma(x, 1.4426950408889634, WIDE_SHIFT), whole = shifted - WIDE_SHIFT;
    double r = fma(whole, -WIDE_LN_2, x);
    return exp_near_0(r) * double_of((wide_bits_of(shifted) << 52) + ONE_BITS);
}

/* atanh(s) / s by t = s^2, for numbers s = (m - 1) / (m + 1) with m from sqrt(1/2) to sqrt(2) */
INSIDE double atanh_ratio(double t) {
    double q = 1.180863552866e-1;
    q = fma(q, t, 1.426749869510e-1);
    q = fma(q, t, 2.000019282914e-1);
    q = fma(q, t, 3.333333262085e-1);
    return fma(q, t, 1.000000000004e0);
}

/* ln(x) for normal numbers x > 0 */
INSIDE double wide_log(double x) {
    uint64_t bits = wide_bits_of(x), power = (bits + (ONE_BITS - ROOT_OF_HALF_BITS)) >> 52;
    double m = double_of(bits - (power << 52) + ONE_BITS), s = (m - 1.0) / (m + 1.0);
    double exponent = double_of(0x4330000000000000ull | power) - (4503599627370496.0 + 1023.0);
    return exponent * WIDE_LN_2 + 2.0 * s * atanh_ratio(s * s);
}

/* atanh(s) / s by t = s^2, for |s| <= 1/3 */
INSIDE double atanh_ratio_to_third(double t) {
    double q = 1.093752612734e-1;
    q = fma(q, t, 8.558859639627e-2);
    q = fma(q, t, 1.115286397435e-1);
    q = fma(q, t, 1.428405563656e-1);
    q = fma(q, t, 2.000003115771e-1);
    q = fma(q, t, 3.333333311473e-1);
    return fma(q, t, 1.000000000002e0);
}

/* ln(1 + u) for u from -1/2 to 1 */
INSIDE double wide_log1p(double u) {
    double s = u / (u + 2.0);
    return 2.0 * s * atanh_ratio_to_third(s * s);
}

/* cos(pi v) / (1 - 4 v^2) by t = v^2, for |v| <= 1/2 */
INSIDE double cos_ratio(double t) {
    double q = -4.568755042531e-04;
    q = fma(q, t, 6.327421281404e-03);
    q = fma(q, t, -5.724878433648e-02);
    q = fma(q, t, 3.195032840300e-01);
    q = fma(q, t, -9.348021996842e-01);
    return fma(q, t, 9.999999999970e-01);
}

/* cos(pi v) for |v| <= 1 */
INSIDE double cos_of_half_turns(double v) {
    double a = fabs(v), near = wide_chosen(a > 0.5, 1.0 - a, a), t = near * near;
    double size = cos_ratio(t) * (1.0 - 4.0 * t);
    return wide_chosen(a > 0.5, -size, size);
}

/* ---- the normal distribution */

/* erfinv(x) / x by u = 2 w / 5 - 1, w = -ln(1 - x^2) from 0 to 5 */
INSIDE double inverse_erf_near(double u) {
    double q = 4.149577435469e-6;
    q = fma(q, u, -3.333980931687e-5);
    q = fma(q, u, 2.515743535765e-5);
    q = fma(q, u, 2.840751528898e-4);
    q = fma(q, u, -8.364687382110e-4);
    q = fma(q, u, -4.843499507077e-4);
    q = fma(q, u, 8.525934497813e-3);
    q = fma(q, u, -1.957419400712e-2);
    q = fma(q, u, -2.610828076208e-2);
    q = fma(q, u, 6.166007234735e-1);
    return fma(q, u, 1.501409351728e0);
}

/* the same by u, which grows from -1 to 1 as sqrt(w) does from sqrt(5) to 4.15 */
INSIDE double inverse_erf_far(double u) {
    double q = -2.109589976637e-5;
    q = fma(q, u, 6.864287325739e-5);
    q = fma(q, u, -2.915117389220e-5);
    q = fma(q, u, -2.615175664968e-4);
    q = fma(q, u, 8.502717593516e-4);
    q = fma(q, u, -1.637178022114e-3);
    q = fma(q, u, 2.531582745748e-3);
    q = fma(q, u, -3.835910335899e-3);
    q = fma(q, u, 5.553282738622e-3);
    q = fma(q, u, 9.613762618951e-1);
    return fma(q, u, 3.026638164429e0);
}

/* the same, divided by sqrt(w), by u = 1 / sqrt(w) from 1/10.3 to 1/4.1 */
INSIDE double inverse_erf_farther(double u) {
    double q = 4.282179433328e1;
    q = fma(q, u, -6.184641333809e1);
    q = fma(q, u, 4.021412316928e1);
    q = fma(q, u, -1.631792314006e1);
    q = fma(q, u, 5.224675558600e0);
    q = fma(q, u, -1.256417617318e0);
    q = fma(q, u, -2.596839522253e-2);
    return fma(q, u, 1.000284468010e0);
}

/* erfinv(x) / x, given w; of normal numbers near the ends of float, w is at most 103. */
INSIDE double inverse_erf_ratio(double w) {
    double r = sqrt(w), near = inverse_erf_near(w * 0.4 - 1.0);
    double far = inverse_erf_far((r - 3.193033988749895) * 1.044969192472864), farther = r * inverse_erf_farther(1.0 / r);
    return wide_chosen(w < 5.0, near, wide_chosen(r < 4.15, far, farther));
}

INSIDE double inverse_erf(double x) { return x * inverse_erf_ratio(-wide_log(1.0 - x * x)); }

/* The number below which a standard normal one lies with probability p, divided by the square root of 2 */
INSIDE double inverse_normal(double p) {
    return (2.0 * p - 1.0) * inverse_erf_ratio(-wide_log(4.0 * p * (1.0 - p)));
}

/* (a + 3) exp(a^2) erfc(a) for a >= 0, by u = 1 - 6 / (a + 3) */
INSIDE double scaled_tail(double u) {
    double q = -2.392886541323e-6;
    q = fma(q, u, -1.030247874086e-5);
    q = fma(q, u, 2.743279188435e-5);
    q = fma(q, u, 9.873707189082e-5);
    q = fma(q, u, -2.747045234236e-4);
    q = fma(q, u, -5.426214444651e-4);
    q = fma(q, u, 3.033257117604e-3);
    q = fma(q, u, -1.214341703665e-3);
    q = fma(q, u, -2.682707130542e-2);
    q = fma(q, u, 1.195280750646e-1);
    q = fma(q, u, -3.104672766619e-1);
    q = fma(q, u, 5.902283378006e-1);
    q = fma(q, u, -8.833944527815e-1);
    return fma(q, u, 1.074006907283e0);
}

/* exp(a^2) erfc(a) for a >= 0 */
INSIDE double wide_erfcx(double a) {
    double share = 1.0 / (a + 3.0);
    return scaled_tail(1.0 - 6.0 * share) * share;
}

/* ---- gamma */

/* digamma(x) / (x - its zero) by u = 2 x - 3, for x from 1 to 2 */
INSIDE double psi_slope(double u) {
    double q = 1.290182098197e-6;
    q = fma(q, u, -3.761455020844e-6);
    q = fma(q, u, 7.099058476243e-6);
    q = fma(q, u, -2.166338893317e-5);
    q = fma(q, u, 7.040579934119e-5);
    q = fma(q, u, -2.117419910580e-4);
    q = fma(q, u, 6.367246893782e-4);
    q = fma(q, u, -1.934770213420e-3);
    q = fma(q, u, 5.936822944658e-3);
    q = fma(q, u, -1.855065300776e-2);
    q = fma(q, u, 6.013561931086e-2);
    q = fma(q, u, -2.118137092821e-1);
    return fma(q, u, 9.510558760498e-1);
}

/* ln gamma(x) / ((x - 1) (x - 2)) by u = x - 2, for x from 1 to 3 */
INSIDE double lgamma_ratio(double u) {
    double q = -2.459751207370e-6;
    q = fma(q, u, 4.868949535552e-6);
    q = fma(q, u, -4.506837571707e-7);
    q = fma(q, u, 2.267427112340e-6);
    q = fma(q, u, -2.112737013147e-5);
    q = fma(q, u, 4.368119646233e-5);
    q = fma(q, u, -8.115387363021e-5);
    q = fma(q, u, 1.798232335020e-4);
    q = fma(q, u, -4.063129460704e-4);
    q = fma(q, u, 9.160979929819e-4);
    q = fma(q, u, -2.108031727890e-3);
    q = fma(q, u, 4.998548565673e-3);
    q = fma(q, u, -1.238419942667e-2);
    q = fma(q, u, 3.296500512207e-2);
    q = fma(q, u, -1.003173015211e-1);
    return fma(q, u, 4.227843350627e-1);
}

#define ZERO_OF_PSI 1.4616321449683622
#define REST_OF_ZERO 9.5499954299656977e-17

/* digamma(x) for x > 0: below 2 around its zero, with digamma(x) = digamma(x + 1) - 1 / x; above by Stirling's series at
x + 6. */
INSIDE double wide_digamma(double x) {
    double near = wide_chosen(x < 1.0, x + 1.0, x), slope = psi_slope(2.0 * near - 3.0);
    near = ((near - ZERO_OF_PSI) - REST_OF_ZERO) * slope;
    double low = wide_chosen(x < 1.0, near - 1.0 / x, near);
    double a = x * (x + 1.0) * (x + 2.0), da = (3.0 * x + 6.0) * x + 2.0; /* a product and its derivative */
    double y = x + 3.0, b = y * (y + 1.0) * (y + 2.0), db = (3.0 * y + 6.0) * y + 2.0;
    double share = 1.0 / (x + 6.0), t = share * share;
    double series = ((t * 0.004166666666666667 - 0.003968253968253968) * t + 0.008333333333333333) * t;
    double high = wide_log(x + 6.0) - 0.5 * share + t * (series - 0.08333333333333333) - (da * b + a * db) / (a * b);
    return wide_chosen(x < 2.0, low, high);
}

/* The derivative of digamma for x > 0: six terms 1 / (x + k)^2, and the series at x + 6 */
INSIDE double wide_trigamma(double x) {
    double a = x * x, b = (x + 1.0) * (x + 1.0), c = (x + 2.0) * (x + 2.0);
    double first = (b * c + a * c + a * b) / (a * b * c);
    a = (x + 3.0) * (x + 3.0), b = (x + 4.0) * (x + 4.0), c = (x + 5.0) * (x + 5.0);
    double second = (b * c + a * c + a * b) / (a * b * c);
    double share = 1.0 / (x + 6.0), t = share * share;
    double series = ((t * -0.03333333333333333 + 0.023809523809523808) * t - 0.03333333333333333) * t;
    return first + (second + share * (1.0 + 0.5 * share + t * (series + 0.16666666666666666)));
}

/* ln gamma(x) for x > 0: below 1 by gamma(x + 1) / x, above 3 by Stirling's series at x + 4. */
INSIDE double wide_lgamma(double x) {
    double near = wide_chosen(x < 1.0, x + 1.0, x), of_near = lgamma_ratio(near - 2.0) * ((near - 1.0) * (near - 2.0));
    double z = x + 4.0, share = 1.0 / z, t = share * share;
    double series = ((t * 7.936507936507937e-4 - 2.777777777777778e-3) * t + 0.08333333333333333) * share;
    double log_of_rest = wide_log(wide_chosen(x < 1.0, x, x * (x + 1.0) * (x + 2.0) * (x + 3.0)));
    double far = (z - 0.5) * wide_log(z) - z + 0.91893853320467274 + series - log_of_rest;
    return wide_chosen(x < 3.0, wide_chosen(x < 1.0, of_near - log_of_rest, of_near), far);
}
