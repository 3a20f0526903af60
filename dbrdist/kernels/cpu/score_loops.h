/* Cross entropies of rows of n = numbers[0] scores, and their gradients. Included by vector_loops.h, which says what the
macros mean. Labels stand in arrays of float, which hold integers up to 2^24. */

/* -1 where a label is none of n. */
INSIDE ptrdiff_t place_of(float label, ptrdiff_t n) { return label >= 0.0f && label < (float)n ? (ptrdiff_t)label : -1; }

/* As np.clip: differences from what is finite are no NaN, but NaN stays. */
INSIDE float as_finite(float x) {
    x = x > 3.402823466e38f ? 3.402823466e38f : x;
    return x < -3.402823466e38f ? -3.402823466e38f : x;
}

/* Of a group of short rows, as gather_rows lays them: the largest of each, or with "clips" the largest finite number; x less
that, instead of x; and the sum of the powers of that. */
INSIDE void shift_group(float *restrict x, float *restrict largest, float *restrict powers, const ptrdiff_t n,
                        const int clips) {
    double sums[GROUP];
    FOR_GROUP largest[r] = -INFINITY;
    for (ptrdiff_t j = 0; j < n; ++j) FOR_GROUP largest[r] = LARGER(x[j * GROUP + r], largest[r]);
    if (clips) FOR_GROUP largest[r] = as_finite(largest[r]);
    FOR_GROUP sums[r] = 0;
    for (ptrdiff_t j = 0; j < n; ++j)
        FOR_GROUP {
            float below = x[j * GROUP + r] - largest[r];
            x[j * GROUP + r] = below;
            sums[r] += exp_of(below);
        }
    FOR_GROUP powers[r] = (float)sums[r];
}

INSIDE void scores_of_group(float *restrict shift, float *restrict total, float *restrict at, float *restrict below,
                            const float *restrict from, const float *restrict label, ptrdiff_t count, const ptrdiff_t n) {
    float x[SHORT * GROUP], largest[GROUP], powers[GROUP];
    double sums[GROUP];
    gather_rows(x, from, count, n);
    shift_group(x, largest, powers, n, 1);
    FOR_GROUP sums[r] = 0;
    for (ptrdiff_t j = 0; j < n; ++j) FOR_GROUP sums[r] += x[j * GROUP + r];
    for (ptrdiff_t r = 0; r < count; ++r) {
        shift[r] = largest[r];
        total[r] = powers[r];
        below[r] = (float)(sums[r] / (double)n);
        ptrdiff_t place = place_of(label[r], n);
        at[r] = place < 0 ? NAN : x[place * GROUP + r];
    }
}

/* shift is the largest score, or the largest finite number; total the sum of exp(x - shift), at x - shift at the label, and
below the mean of x - shift */
FLOAT_LOOP(cross_entropy, OUT(0, shift) OUT(1, total) OUT(2, at) OUT(3, below) IN(4, from) IN(5, label), ROW_LENGTH, {
    IF_SHORT(scores_of_group, shift + i, total + i, at + i, below + i, from + i * n, label + i)
    const float *restrict x = from + i * n;
    float largest = as_finite(row_max(x, n, whole)), powers[LANES] = {0}, rest[LANES] = {0};
    const float share = 1.0f / (float)n; /* of each, since the sum of large ones may be none of float */
    double wide = 0, rest_wide = 0;
    for (ptrdiff_t j = 0; j < whole; j += LANES)
        for (int k = 0; k < LANES; ++k) {
            float difference = x[j + k] - largest;
            rest[k] += difference * share;
            powers[k] += exp_of(difference);
        }
    for (ptrdiff_t j = whole; j < n; ++j) {
        float difference = x[j] - largest;
        rest_wide += difference * share;
        wide += exp_of(difference);
    }
    shift[i] = largest;
    total[i] = (float)(wide + sum_of_lanes(powers));
    below[i] = (float)(rest_wide + sum_of_lanes(rest));
    ptrdiff_t place = place_of(label[i], n);
    at[i] = place < 0 ? NAN : x[place] - largest;
})

/* One number of each row, for each of its elements. */
INSIDE void spread_rows(float *restrict to, const float *restrict from, ptrdiff_t count, const ptrdiff_t n) {
    for (ptrdiff_t r = 0; r < count; ++r)
        for (ptrdiff_t j = 0; j < n; ++j) to[r * n + j] = from[r];
}

INSIDE void scores_backward_of_group(float *restrict gx, const float *restrict x, const float *restrict shift,
                                     const float *restrict factor, const float *restrict less,
                                     const float *restrict label, const float *restrict weight, ptrdiff_t count,
                                     const ptrdiff_t n) {
    float a[SHORT * GROUP], of_label[GROUP];
    gather_rows(a, x, count, n);
    float shifts[GROUP] = {0}, factors[GROUP] = {0}, lesses[GROUP] = {0};
    for (ptrdiff_t r = 0; r < count; ++r) {
        shifts[r] = shift[r];
        factors[r] = factor[r];
        lesses[r] = less[r];
    }
    for (ptrdiff_t k = 0; k < n * GROUP; k += GROUP) FOR_GROUP a[k + r] -= shifts[r];
    for (ptrdiff_t k = 0; k < n * GROUP; ++k) a[k] = exp_of(a[k]);
    for (ptrdiff_t k = 0; k < n * GROUP; k += GROUP) FOR_GROUP a[k + r] *= factors[r];
    for (ptrdiff_t r = 0; r < count; ++r) {
        ptrdiff_t place = place_of(label[r], n);
        of_label[r] = place < 0 ? 0.0f : a[place * GROUP + r] - weight[r];
    }
    for (ptrdiff_t k = 0; k < n * GROUP; k += GROUP) FOR_GROUP a[k + r] -= lesses[r];
    scatter_rows(gx, a, count, n);
    for (ptrdiff_t r = 0; r < count; ++r) {
        ptrdiff_t place = place_of(label[r], n);
        if (place >= 0) gx[r * n + place] = of_label[r];
    }
}

/* exp(x - shift) factor - less, and less weight instead at the label */
FLOAT_LOOP(cross_entropy_gradient,
           OUT(0, to) IN(1, from) IN(2, shift) IN(3, factor) IN(4, less) IN(5, label) IN(6, weight), ROW_LENGTH, {
    (void)whole;
    IF_SHORT(scores_backward_of_group, to + i * n, from + i * n, shift + i, factor + i, less + i, label + i, weight + i)
    const float *restrict x = from + i * n;
    float *restrict gx = to + i * n;
    float low = shift[i], scale = factor[i], rest = less[i];
    for (ptrdiff_t j = 0; j < n; ++j) gx[j] = exp_of(x[j] - low) * scale - rest;
    ptrdiff_t place = place_of(label[i], n);
    if (place >= 0) gx[place] = exp_of(x[place] - low) * scale - weight[i];
})

/* ---- for probabilities q instead of labels */

/* What has no probability adds nothing, also where the logarithm is -inf. */
#define SOFT_TERM(q, difference) chosen((q) == 0.0f, 0.0f, (q) * (difference))

INSIDE void soft_scores_of_group(float *restrict shift, float *restrict total, float *restrict shares, float *restrict loss,
                                 const float *restrict from, const float *restrict q_from, ptrdiff_t count,
                                 const ptrdiff_t n) {
    float x[SHORT * GROUP], q[SHORT * GROUP], largest[GROUP], powers[GROUP];
    double terms[GROUP], parts[GROUP], others[GROUP];
    gather_rows(x, from, count, n);
    gather_rows(q, q_from, count, n);
    shift_group(x, largest, powers, n, 0);
    FOR_GROUP terms[r] = parts[r] = others[r] = 0;
    for (ptrdiff_t j = 0; j < n; ++j)
        FOR_GROUP {
            float share = q[j * GROUP + r];
            terms[r] += SOFT_TERM(share, x[j * GROUP + r]);
            parts[r] += share;
            float power = exp_of(x[j * GROUP + r]);
            others[r] += power < 1.0f ? power : 0.0f;
        }
    for (ptrdiff_t r = 0; r < count; ++r) {
        float log = LOG_OF_SUM(powers[r], others[r]);
        shift[r] = largest[r];
        total[r] = powers[r];
        shares[r] = (float)parts[r];
        loss[r] = (float)((powers[r] == powers[r] ? log : powers[r]) * parts[r] - terms[r]);
    }
}

/* shift is the largest score, total the sum of exp(x - shift), shares the sum of q */
FLOAT_LOOP(soft_cross_entropy,
           OUT(0, shift) OUT(1, total) OUT(2, shares) OUT(3, loss) IN(4, from) IN(5, q_from), ROW_LENGTH, {
    IF_SHORT(soft_scores_of_group, shift + i, total + i, shares + i, loss + i, from + i * n, q_from + i * n)
    const float *restrict x = from + i * n;
    const float *restrict q = q_from + i * n;
    float largest = row_max(x, n, whole), powers[LANES] = {0}, terms[LANES] = {0}, parts[LANES] = {0};
    double wide = 0, wide_terms = 0, wide_parts = 0;
    for (ptrdiff_t j = 0; j < whole; j += LANES)
        for (int k = 0; k < LANES; ++k) {
            float difference = x[j + k] - largest;
            terms[k] += SOFT_TERM(q[j + k], difference);
            parts[k] += q[j + k];
            powers[k] += exp_of(difference);
        }
    for (ptrdiff_t j = whole; j < n; ++j) {
        float difference = x[j] - largest;
        wide_terms += SOFT_TERM(q[j], difference);
        wide_parts += q[j];
        wide += exp_of(difference);
    }
    float sum = (float)(wide + sum_of_lanes(powers));
    double others = 0;
    if (sum < NEAR_ONE)
        for (ptrdiff_t j = 0; j < n; ++j) {
            float power = exp_of(x[j] - largest);
            others += power < 1.0f ? power : 0.0f;
        }
    float log = LOG_OF_SUM(sum, others);
    wide_parts += sum_of_lanes(parts);
    shift[i] = largest;
    total[i] = sum;
    shares[i] = (float)wide_parts;
    loss[i] = (float)((sum == sum ? log : sum) * wide_parts - (wide_terms + sum_of_lanes(terms)));
})

INSIDE void soft_backward_of_group(float *restrict gx, const float *restrict x, const float *restrict q,
                                   const float *restrict shift, const float *restrict factor, const float *restrict gy,
                                   ptrdiff_t count, const ptrdiff_t n) {
    float shifts[SHORT * GROUP], factors[SHORT * GROUP], slopes[SHORT * GROUP];
    spread_rows(shifts, shift, count, n);
    spread_rows(factors, factor, count, n);
    spread_rows(slopes, gy, count, n);
    for (ptrdiff_t j = 0; j < count * n; ++j) gx[j] = exp_of(x[j] - shifts[j]) * factors[j] - q[j] * slopes[j];
}

/* exp(x - shift) factor - q gy */
FLOAT_LOOP(soft_cross_entropy_gradient,
           OUT(0, to) IN(1, from) IN(2, q_from) IN(3, shift) IN(4, factor) IN(5, slope), ROW_LENGTH, {
    IF_SHORT(soft_backward_of_group, to + i * n, from + i * n, q_from + i * n, shift + i, factor + i, slope + i)
    const float *restrict x = from + i * n;
    const float *restrict q = q_from + i * n;
    float *restrict gx = to + i * n;
    float low = shift[i], scale = factor[i], gy = slope[i];
    (void)whole;
    for (ptrdiff_t j = 0; j < n; ++j) gx[j] = exp_of(x[j] - low) * scale - q[j] * gy;
})
