// Batch normalization of a matrix of M rows and C channels, in C order: what channels-last images are.
//
// A thread has V neighbouring channels, which it reads at once, and every TY * gridDim.y-th row. Blocks of one column of
// the grid leave their parts in memory, and the last of them to finish puts these together, always in the same order, so
// that results do not depend on who comes last. Its counter is 0 again afterwards. Blocks are of TX x TY threads.

template <typename T, int V>
struct alignas(sizeof(T) * V) Pack { T v[V]; };

template <typename T, int V>
__device__ void load(const T* at, float* out) {
    Pack<T, V> pack = *reinterpret_cast<const Pack<T, V>*>(at);
#pragma unroll
    for (int k = 0; k < V; ++k) out[k] = float(pack.v[k]);
}

template <typename T, int V>
__device__ void store(T* at, const float* in) {
    Pack<T, V> pack;
#pragma unroll
    for (int k = 0; k < V; ++k) pack.v[k] = T(in[k]);
    *reinterpret_cast<Pack<T, V>*>(at) = pack;
}

// V numbers that other blocks have written.
template <int V>
__device__ void fetch(const float* at, float* out) {
    if (V == 4) {
        float4 four = __ldcg(reinterpret_cast<const float4*>(at));
        out[0] = four.x; out[V > 1 ? 1 : 0] = four.y; out[V > 2 ? 2 : 0] = four.z; out[V > 3 ? 3 : 0] = four.w;
    } else {
#pragma unroll
        for (int k = 0; k < V; ++k) out[k] = __ldcg(at + k);
    }
}

// Count, means and sums of squared distances from them, of two parts (Chan et al. 1979); no part may have any.
template <int V>
__device__ void merge(float& n, float* mean, float* m2, float n2, const float* mean2, const float* m22) {
    const float inverse = 1 / fmaxf(n + n2, 1);
#pragma unroll
    for (int k = 0; k < V; ++k) {
        const float d = mean2[k] - mean[k];
        m2[k] += m22[k] + d * d * (n * n2 * inverse);
        mean[k] = (n * mean[k] + n2 * mean2[k]) * inverse;
    }
    n += n2;
}

// The same over the rows of a block; the result is that of ty = 0. counts: TY, means and spreads: TY x TX x V. Threads
// of one row that are active have the same count.
template <int V>
__device__ void merge_rows(bool is_active, float& n, float* mean, float* m2, float* counts, float* means, float* spreads) {
    const int ty = threadIdx.y, width = blockDim.x * V, at = ty * width + threadIdx.x * V;
    for (int half = blockDim.y / 2; half > 0; half /= 2) {
        if (ty >= half && ty < 2 * half) {
            if (is_active) counts[ty] = n;
#pragma unroll
            for (int k = 0; k < V; ++k) { means[at + k] = mean[k]; spreads[at + k] = m2[k]; }
        }
        __syncthreads();
        if (ty < half) merge<V>(n, mean, m2, counts[ty + half], means + at + half * width, spreads + at + half * width);
    }
}

// N sums over the rows of a block, likewise. Rows that have been given away are not written again before they are read.
// shared: N x rows x width.
template <int V, int N>
__device__ void add_rows(float (&sums)[N][V], float* shared) {
    const int ty = threadIdx.y, width = blockDim.x * V, plane = blockDim.y * width, at = ty * width + threadIdx.x * V;
    for (int half = blockDim.y / 2; half > 0; half /= 2) {
        if (ty >= half && ty < 2 * half)
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int k = 0; k < V; ++k) shared[n * plane + at + k] = sums[n][k];
        __syncthreads();
        if (ty < half)
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int k = 0; k < V; ++k) sums[n][k] += shared[n * plane + at + half * width + k];
    }
}

// g: the gradient of a ReLU's input. It is the sum of one or two gradients of its output y where that is not 0, and is
// written to g_out, too.
template <typename T, int V>
__device__ void through_relu(const T* gy, const T* more, const T* y, T* g_out, long long at, float* g) {
    float w[V];
    load<T, V>(gy + at, g);
    if (more) {
        load<T, V>(more + at, w);
#pragma unroll
        for (int k = 0; k < V; ++k) g[k] = float(T(g[k] + w[k]));
    }
    load<T, V>(y + at, w);
#pragma unroll
    for (int k = 0; k < V; ++k) if (w[k] == 0) g[k] = 0;
    store<T, V>(g_out + at, g);
}

// True in all threads of the block that comes last in its column of the grid.
__device__ bool is_last(unsigned* counters) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0 && threadIdx.y == 0)
        last = atomicInc(counters + blockIdx.x, gridDim.y - 1) == gridDim.y - 1;
    __syncthreads();
    __threadfence();
    return last;
}

// The sums of all blocks of a column of the grid, in the block that comes last; false in all others.
// parts: N x gridDim.y x C.
template <int V, int N>
__device__ bool add_blocks(float (&sums)[N][V], float* shared, float* parts, unsigned* counters, int c, int C) {
    const int ty = threadIdx.y;
    const long long plane = (long long)gridDim.y * C;
    add_rows<V, N>(sums, shared);
    if (ty == 0 && c < C)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int k = 0; k < V; ++k) parts[n * plane + (long long)blockIdx.y * C + c + k] = sums[n][k];
    if (!is_last(counters)) return false;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int k = 0; k < V; ++k) sums[n][k] = 0;
    float v[V];
    if (c < C)
#pragma unroll (N == 2 ? 4 : 2)
        for (int r = ty; r < gridDim.y; r += blockDim.y)
#pragma unroll
            for (int n = 0; n < N; ++n) {
                fetch<V>(parts + n * plane + (long long)r * C + c, v);
#pragma unroll
                for (int k = 0; k < V; ++k) sums[n][k] += v[k];
            }
    add_rows<V, N>(sums, shared);
    return true;
}

// How many of M rows are row + step, row + 2 step and so on.
__device__ float count_from(long long row, long long step, long long M) {
    return row < M ? float((M - 1 - row) / step + 1) : 0.0f;
}

// parts: 2 x gridDim.y x C. saved, if any: gamma and beta as they are now. The running statistics, if any, become decay
// times themselves plus their weight times those of the batch.
template <typename T, int V>
__global__ void bn_statistics(const T* x, long long M, int C, float* parts, unsigned* counters, float* mean, float* var,
                              const float* gamma, const float* beta, float* saved, float* running_mean,
                              float* running_var, float decay, float of_mean, float of_var) {
    extern __shared__ float shared[];  // TY x (1 + 2 TX V)
    const int tx = threadIdx.x, ty = threadIdx.y, TX = blockDim.x, TY = blockDim.y;
    const int c = (blockIdx.x * TX + tx) * V;
    float *counts = shared, *means = shared + TY, *spreads = means + TY * TX * V;
    float n, mu[V], m2[V], shift[V], sum[V], v[V];
    const long long step = (long long)gridDim.y * TY;
    long long row = (long long)blockIdx.y * TY + ty;
    n = count_from(row, step, M);
#pragma unroll
    for (int k = 0; k < V; ++k) sum[k] = mu[k] = m2[k] = 0;
    if (c < C && row < M) {
        load<T, V>(x + row * C + c, shift);  // the distances from any element have the same spread, and no large mean
#pragma unroll
        for (int k = 0; k < V; ++k) if (!isfinite(shift[k])) shift[k] = 0;
#pragma unroll 4
        for (; row < M; row += step) {
            load<T, V>(x + row * C + c, v);
#pragma unroll
            for (int k = 0; k < V; ++k) {
                float d = v[k] - shift[k];
                sum[k] += d;
                m2[k] = fmaf(d, d, m2[k]);
            }
        }
#pragma unroll
        for (int k = 0; k < V; ++k) {
            float d = sum[k] / n;
            mu[k] = shift[k] + d;
            m2[k] -= d * sum[k];
            if (m2[k] < 0) m2[k] = 0;
        }
    }
    merge_rows<V>(c < C, n, mu, m2, counts, means, spreads);
    const long long plane = (long long)gridDim.y * C;
    if (ty == 0 && c < C)
#pragma unroll
        for (int k = 0; k < V; ++k) {
            float* part = parts + (long long)blockIdx.y * C + c + k;
            part[0] = mu[k];
            part[plane] = m2[k];
        }
    if (!is_last(counters)) return;
    n = 0;
#pragma unroll
    for (int k = 0; k < V; ++k) mu[k] = m2[k] = 0;
    if (c < C)
#pragma unroll 4
        for (int b = ty; b < gridDim.y; b += TY) {
            const float* part = parts + (long long)b * C + c;
            float mean2[V], m22[V], rows = float((M / step) * TY + max(0LL, min((long long)TY, M % step - (long long)b * TY)));
            fetch<V>(part, mean2);
            fetch<V>(part + plane, m22);
            merge<V>(n, mu, m2, rows, mean2, m22);
        }
    merge_rows<V>(c < C, n, mu, m2, counts, means, spreads);
    if (ty == 0 && c < C)
#pragma unroll
        for (int k = 0; k < V; ++k) {
            mean[c + k] = mu[k];
            var[c + k] = m2[k] / n;
            if (running_mean) {
                running_mean[c + k] = decay * running_mean[c + k] + of_mean * mu[k];
                running_var[c + k] = decay * running_var[c + k] + of_var * (m2[k] / n);
            }
            if (saved) {
                saved[c + k] = gamma[c + k];
                saved[C + c + k] = beta[c + k];
            }
        }
}

// y = (x - mean) gamma / sqrt(var + eps) + beta, rectified where RELU, and after the addition of added where RELU is 2;
// NaN stays.
template <typename T, int V, int RELU>
__global__ void bn_apply(const T* x, T* y, long long M, int C, const float* mean, const float* var, const float* gamma,
                         const float* beta, float eps, const T* added) {
    const int c = (blockIdx.x * blockDim.x + threadIdx.x) * V;
    if (c >= C) return;
    float mu[V], a[V], b[V], v[V], w[V];
#pragma unroll
    for (int k = 0; k < V; ++k) {
        mu[k] = mean[c + k];
        a[k] = gamma[c + k] / sqrtf(var[c + k] + eps);
        b[k] = beta[c + k];
    }
    const long long step = (long long)gridDim.y * blockDim.y;
#pragma unroll 4
    for (long long row = (long long)blockIdx.y * blockDim.y + threadIdx.y; row < M; row += step) {
        load<T, V>(x + row * C + c, v);
        if (RELU == 2) load<T, V>(added + row * C + c, w);
#pragma unroll
        for (int k = 0; k < V; ++k) {
            v[k] = fmaf(v[k] - mu[k], a[k], b[k]);
            if (RELU == 2) v[k] += w[k];
            if (RELU && v[k] <= 0) v[k] = 0;
        }
        store<T, V>(y + row * C + c, v);
    }
}

// The sums of gy x_hat and of gy; parts: 2 x gridDim.y x C. RELU: gy counts where the output was not 0. Where RELU is 2,
// that output y is that of a sum, more is added to gy if there is any, and what counts is written to g.
template <typename T, int V, int RELU>
__global__ void bn_sums(const T* x, const T* gy, long long M, int C, float* parts, unsigned* counters, const float* mean,
                        const float* var, const float* saved, float* ggamma, float* gbeta, float eps, const T* y,
                        const T* more, T* g_out) {
    extern __shared__ float shared[];  // 2 x TY x TX x V
    const int ty = threadIdx.y, TY = blockDim.y, c = (blockIdx.x * blockDim.x + threadIdx.x) * V;
    float mu[V], a[V], b[V], sums[2][V], v[V], g[V];  // sums: of gy, and along x
#pragma unroll
    for (int k = 0; k < V; ++k) {
        sums[0][k] = sums[1][k] = 0;
        mu[k] = c < C ? mean[c + k] : 0;
        a[k] = RELU == 1 && c < C ? saved[c + k] / sqrtf(var[c + k] + eps) : 0;
        b[k] = RELU == 1 && c < C ? saved[C + c + k] : 0;
    }
    const long long step = (long long)gridDim.y * TY;
    if (c < C)
#pragma unroll 4
        for (long long row = (long long)blockIdx.y * TY + ty; row < M; row += step) {
            load<T, V>(x + row * C + c, v);
            if (RELU == 2) through_relu<T, V>(gy, more, y, g_out, row * C + c, g);
            else load<T, V>(gy + row * C + c, g);
#pragma unroll
            for (int k = 0; k < V; ++k) {
                float d = v[k] - mu[k];
                if (RELU == 1 && float(T(fmaf(d, a[k], b[k]))) <= 0) g[k] = 0;
                sums[0][k] += g[k];
                sums[1][k] = fmaf(g[k], d, sums[1][k]);
            }
        }
    if (!add_blocks<V, 2>(sums, shared, parts, counters, c, C)) return;
    if (ty == 0 && c < C)
#pragma unroll
        for (int k = 0; k < V; ++k) {
            gbeta[c + k] = sums[0][k];
            ggamma[c + k] = sums[1][k] / sqrtf(var[c + k] + eps);
        }
}

// Statistics from the sums of M numbers and of their squares, which a convolution left: sums is 2 x C, share 1 / M. saved
// and running statistics as of bn_statistics; affine (2 x C): the factors and summands by which the output is made.
template <typename T>
__global__ void bn_of_sums(const float* sums, int C, float share, const float* gamma, const float* beta, float eps,
                           float* mean, float* var, float* saved, T* affine, float* running_mean, float* running_var,
                           float decay, float of_mean, float of_var) {
    for (int c = blockIdx.x * blockDim.x + threadIdx.x; c < C; c += gridDim.x * blockDim.x) {
        const float mu = sums[c] * share;
        // At least about its error, so that a channel that is all but constant gets no factor beyond float16; NaN stays.
        float v = fmaf(-mu, mu, sums[C + c] * share);
        if (v < mu * mu * 0x1p-22f) v = mu * mu * 0x1p-22f;
        mean[c] = mu;
        var[c] = v;
        const float scale = gamma[c] / sqrtf(v + eps);
        saved[c] = gamma[c];
        saved[C + c] = beta[c];
        const T factor = T(scale);
        affine[c] = factor;
        affine[C + c] = T(fmaf(-mu, float(factor), beta[c]));  // so that the mean becomes beta, however factor was rounded
        if (running_mean) {
            running_mean[c] = decay * running_mean[c] + of_mean * mu;
            running_var[c] = decay * running_var[c] + of_var * v;
        }
    }
}

// y is the ReLU of the sum of two normalizations, of x and of x2.
template <typename T, int V>
__global__ void bn_apply_two(const T* x, const T* x2, T* y, long long M, int C, const float* mean, const float* var,
                             const float* gamma, const float* beta, float eps, const float* mean2, const float* var2,
                             const float* gamma2, const float* beta2, float eps2) {
    const int c = (blockIdx.x * blockDim.x + threadIdx.x) * V;
    if (c >= C) return;
    float mu[V], a[V], mu2[V], a2[V], b[V], v[V], w[V];
#pragma unroll
    for (int k = 0; k < V; ++k) {
        mu[k] = mean[c + k];
        mu2[k] = mean2[c + k];
        a[k] = gamma[c + k] / sqrtf(var[c + k] + eps);
        a2[k] = gamma2[c + k] / sqrtf(var2[c + k] + eps2);
        b[k] = beta[c + k] + beta2[c + k];
    }
    const long long step = (long long)gridDim.y * blockDim.y;
#pragma unroll 4
    for (long long row = (long long)blockIdx.y * blockDim.y + threadIdx.y; row < M; row += step) {
        load<T, V>(x + row * C + c, v);
        load<T, V>(x2 + row * C + c, w);
#pragma unroll
        for (int k = 0; k < V; ++k) {
            v[k] = fmaf(v[k] - mu[k], a[k], fmaf(w[k] - mu2[k], a2[k], b[k]));
            if (v[k] <= 0) v[k] = 0;
        }
        store<T, V>(y + row * C + c, v);
    }
}

// As bn_sums where RELU is 2, and the sums of two normalizations of which y was made, x and x2, which have one gbeta.
// parts: 3 x gridDim.y x C.
template <typename T, int V>
__global__ void bn_sums_of_two(const T* x, const T* gy, long long M, int C, float* parts, unsigned* counters,
                               const T* x2, const T* y, const T* more, T* g_out, const float* mean, const float* var,
                               float eps, const float* mean2, const float* var2, float eps2, float* ggamma, float* gbeta,
                               float* ggamma2, float* gbeta2) {
    extern __shared__ float shared[];  // 3 x TY x TX x V
    const int ty = threadIdx.y, TY = blockDim.y, c = (blockIdx.x * blockDim.x + threadIdx.x) * V;
    float mu[V], mu2[V], sums[3][V], v[V], g[V];  // sums: of gy, along x, along x2
#pragma unroll
    for (int k = 0; k < V; ++k) {
        sums[0][k] = sums[1][k] = sums[2][k] = 0;
        mu[k] = c < C ? mean[c + k] : 0;
        mu2[k] = c < C ? mean2[c + k] : 0;
    }
    const long long step = (long long)gridDim.y * TY;
    if (c < C)
#pragma unroll 2
        for (long long row = (long long)blockIdx.y * TY + ty; row < M; row += step) {
            through_relu<T, V>(gy, more, y, g_out, row * C + c, g);
            load<T, V>(x + row * C + c, v);
#pragma unroll
            for (int k = 0; k < V; ++k) {
                sums[0][k] += g[k];
                sums[1][k] = fmaf(g[k], v[k] - mu[k], sums[1][k]);
            }
            load<T, V>(x2 + row * C + c, v);
#pragma unroll
            for (int k = 0; k < V; ++k) sums[2][k] = fmaf(g[k], v[k] - mu2[k], sums[2][k]);
        }
    if (!add_blocks<V, 3>(sums, shared, parts, counters, c, C)) return;
    if (ty == 0 && c < C)
#pragma unroll
        for (int k = 0; k < V; ++k) {
            gbeta[c + k] = gbeta2[c + k] = sums[0][k];
            ggamma[c + k] = sums[1][k] / sqrtf(var[c + k] + eps);
            ggamma2[c + k] = sums[2][k] / sqrtf(var2[c + k] + eps2);
        }
}

// gx = gamma (gy - (gbeta + x_hat ggamma) share) / sqrt(var + eps), with share = 1 / M
template <typename T, int V, int RELU>
__global__ void bn_input_gradient(const T* x, const T* gy, T* gx, long long M, int C, const float* mean,
                                  const float* var, const float* gamma, const float* saved, const float* ggamma,
                                  const float* gbeta, float eps, float share) {
    const int c = (blockIdx.x * blockDim.x + threadIdx.x) * V;
    if (c >= C) return;
    float mu[V], a[V], b[V], scale[V], slope[V], base[V], v[V], g[V];
#pragma unroll
    for (int k = 0; k < V; ++k) {
        float inverse = 1 / sqrtf(var[c + k] + eps);
        mu[k] = mean[c + k];
        a[k] = RELU ? saved[c + k] / sqrtf(var[c + k] + eps) : 0;
        b[k] = RELU ? saved[C + c + k] : 0;
        scale[k] = gamma[c + k] * inverse;
        slope[k] = ggamma[c + k] * inverse * share;
        base[k] = gbeta[c + k] * share;
    }
    const long long step = (long long)gridDim.y * blockDim.y;
#pragma unroll 4
    for (long long row = (long long)blockIdx.y * blockDim.y + threadIdx.y; row < M; row += step) {
        load<T, V>(x + row * C + c, v);
        load<T, V>(gy + row * C + c, g);
#pragma unroll
        for (int k = 0; k < V; ++k) {
            float d = v[k] - mu[k];
            if (RELU && float(T(fmaf(d, a[k], b[k]))) <= 0) g[k] = 0;
            g[k] = (g[k] - fmaf(d, slope[k], base[k])) * scale[k];
        }
        store<T, V>(gx + row * C + c, g);
    }
}

// running = decay running + weight value, for two vectors of C
template <typename T>
__global__ void bn_move(T* running_mean, T* running_var, const float* mean, const float* var, int C, float decay,
                        float weight_of_mean, float weight_of_var) {
    for (long long c = blockIdx.x * (long long)blockDim.x + threadIdx.x; c < C; c += (long long)gridDim.x * blockDim.x) {
        running_mean[c] = T(decay * float(running_mean[c]) + weight_of_mean * mean[c]);
        running_var[c] = T(decay * float(running_var[c]) + weight_of_var * var[c]);
    }
}
