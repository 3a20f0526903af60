// Rows of K neighbouring elements, a warp for each: softmax and its logarithm, layer normalization; and dropout.
// A: the type of sums over T; G: that of gamma and beta.

#define EACH_ROW(r, rows) \
    for (long long r = blockIdx.x * (long long)(blockDim.x / 32) + threadIdx.x / 32; r < (rows); \
         r += (long long)gridDim.x * (blockDim.x / 32))
#define EACH_OF_ROW(k, K) for (int k = threadIdx.x % 32; k < (K); k += 32)

template <typename A>
__device__ A sum_of_warp(A v) {
    for (int offset = 16; offset; offset /= 2) v += __shfl_xor_sync(~0u, v, offset);
    return v;
}

// NaN stays.
template <typename A>
__device__ A largest_of_warp(A v) {
    for (int offset = 16; offset; offset /= 2) {
        const A other = __shfl_xor_sync(~0u, v, offset);
        v = other > v || other != other ? other : v;
    }
    return v;
}

template <typename T, typename A>
__device__ A largest_of_row(const T* x, int K) {
    A largest = static_cast<A>(x[threadIdx.x % 32 < K ? threadIdx.x % 32 : 0]);
    EACH_OF_ROW(k, K) {
        const A v = static_cast<A>(x[k]);
        if (v > largest || v != v) largest = v;
    }
    return largest_of_warp(largest);
}

template <typename T, typename A>
__global__ void softmax(const T* x, T* y, long long rows, int K) {
    EACH_ROW(r, rows) {
        const T* from = x + r * K;
        T* to = y + r * K;
        const A largest = largest_of_row<T, A>(from, K);
        A sum = 0;
        EACH_OF_ROW(k, K) sum += exp(static_cast<A>(from[k]) - largest);
        sum = sum_of_warp(sum);
        EACH_OF_ROW(k, K) to[k] = T(exp(static_cast<A>(from[k]) - largest) / sum);
    }
}

template <typename T, typename A>
__global__ void log_softmax(const T* x, T* y, long long rows, int K) {
    EACH_ROW(r, rows) {
        const T* from = x + r * K;
        T* to = y + r * K;
        const A largest = largest_of_row<T, A>(from, K);
        A sum = 0;
        EACH_OF_ROW(k, K) sum += exp(static_cast<A>(from[k]) - largest);
        sum = log(sum_of_warp(sum));
        EACH_OF_ROW(k, K) to[k] = T((static_cast<A>(from[k]) - largest) - sum);
    }
}

// y (gy - sum(y gy))
template <typename T, typename A>
__global__ void softmax_backward(const T* y, const T* gy, T* gx, long long rows, int K) {
    EACH_ROW(r, rows) {
        const long long at = r * K;
        A sum = 0;
        EACH_OF_ROW(k, K) sum += static_cast<A>(y[at + k]) * static_cast<A>(gy[at + k]);
        sum = sum_of_warp(sum);
        EACH_OF_ROW(k, K) {
            const A p = static_cast<A>(y[at + k]);
            gx[at + k] = T(p * static_cast<A>(gy[at + k]) - p * sum);
        }
    }
}

// gy - exp(y) sum(gy)
template <typename T, typename A>
__global__ void log_softmax_backward(const T* y, const T* gy, T* gx, long long rows, int K) {
    EACH_ROW(r, rows) {
        const long long at = r * K;
        A sum = 0;
        EACH_OF_ROW(k, K) sum += static_cast<A>(gy[at + k]);
        sum = sum_of_warp(sum);
        EACH_OF_ROW(k, K) gx[at + k] = T(static_cast<A>(gy[at + k]) - exp(static_cast<A>(y[at + k])) * sum);
    }
}

// ---- layer normalization

template <typename T, typename G, typename A>
__global__ void ln_forward(const T* x, const G* gamma, const G* beta, T* y, A* mean, A* var, long long rows, int K,
                           double eps) {
    EACH_ROW(r, rows) {
        const T* from = x + r * K;
        A mu = 0, spread = 0;
        EACH_OF_ROW(k, K) mu += static_cast<A>(from[k]);
        mu = sum_of_warp(mu) / K;
        EACH_OF_ROW(k, K) {
            const A d = static_cast<A>(from[k]) - mu;
            spread += d * d;
        }
        spread = sum_of_warp(spread) / K;
        const A inverse = 1 / sqrt(spread + A(eps));
        EACH_OF_ROW(k, K)
            y[r * K + k] = T((static_cast<A>(from[k]) - mu) * inverse * static_cast<A>(gamma[k]) + static_cast<A>(beta[k]));
        if (threadIdx.x % 32 == 0) mean[r] = mu, var[r] = spread;
    }
}

template <typename T, typename G, typename A>
__global__ void ln_backward(const T* x, const G* gamma, const A* mean, const A* var, const T* gy, T* gx, long long rows,
                            int K, double eps) {
    EACH_ROW(r, rows) {
        const long long at = r * K;
        const A mu = mean[r], inverse = 1 / sqrt(var[r] + A(eps));
        A sum = 0, along = 0;
        EACH_OF_ROW(k, K) {
            const A g = static_cast<A>(gy[at + k]) * static_cast<A>(gamma[k]);
            sum += g;
            along += g * ((static_cast<A>(x[at + k]) - mu) * inverse);
        }
        sum = sum_of_warp(sum) / K;
        along = sum_of_warp(along) / K;
        EACH_OF_ROW(k, K) {
            const A g = static_cast<A>(gy[at + k]) * static_cast<A>(gamma[k]);
            gx[at + k] = T((g - (sum + (static_cast<A>(x[at + k]) - mu) * inverse * along)) * inverse);
        }
    }
}

// The gradients of gamma and beta: sums over the rows, by blocks of 32 columns and 32 rows at a time.
template <typename T, typename G, typename A>
__global__ void ln_columns(const T* x, const A* mean, const A* var, const T* gy, G* ggamma, G* gbeta, long long rows,
                           int K, double eps) {
    __shared__ A alongs[32][33];
    __shared__ A sums[32][33];
    const int tx = threadIdx.x, ty = threadIdx.y;
    int c = blockIdx.x * 32 + tx;
    A along = 0, sum = 0;
    if (c < K)
        for (long long r = ty; r < rows; r += 32) {
            const A g = static_cast<A>(gy[r * K + c]);
            sum += g;
            along += g * ((static_cast<A>(x[r * K + c]) - mean[r]) / sqrt(var[r] + A(eps)));
        }
    alongs[ty][tx] = along;
    sums[ty][tx] = sum;
    __syncthreads();
    along = sum_of_warp(alongs[tx][ty]);  // a warp adds one column
    sum = sum_of_warp(sums[tx][ty]);
    c = blockIdx.x * 32 + ty;
    if (tx == 0 && c < K) ggamma[c] = G(along), gbeta[c] = G(sum);
}

// ---- dropout

struct Words { unsigned long long v[4]; };

// Philox 4x64-10 (Salmon et al. 2011), as NumPy has it.
__device__ Words philox(Words c, unsigned long long key, unsigned long long purpose) {
    for (int round = 0; round < 10; ++round) {
        const unsigned long long a = 0xD2E7470EE14C6C93ull, b = 0xCA5A826395121157ull;
        Words next;
        next.v[0] = __umul64hi(b, c.v[2]) ^ c.v[1] ^ key;
        next.v[1] = b * c.v[2];
        next.v[2] = __umul64hi(a, c.v[0]) ^ c.v[3] ^ purpose;
        next.v[3] = a * c.v[0];
        c = next;
        key += 0x9E3779B97F4A7C15ull;
        purpose += 0xBB67AE8584CAA73Bull;
    }
    return c;
}

// Lines of `length` elements: 0 where 32 random bits are below the threshold, else `scale`. Each line begins with words of
// its own, those after the counter `first`; a thread makes 8 elements. The six numbers from `first` on come from
// `declared` in a captured step, where that is written before each replay.
template <typename T, typename A>
__global__ void dropout(const T* x, T* y, T* mask, long long lines, long long length, unsigned long long first,
                        unsigned long long draw, unsigned long long iteration, unsigned long long epoch,
                        unsigned long long key, unsigned long long purpose, unsigned threshold, double scale,
                        const unsigned long long* declared) {
    if (declared) {
        first = declared[0], draw = declared[1], iteration = declared[2], epoch = declared[3];
        key = declared[4], purpose = declared[5];
    }
    const long long blocks = (length + 7) / 8;
    const T kept = T(A(scale)), dropped = T(A(0));
    for (long long t = blockIdx.x * (long long)blockDim.x + threadIdx.x; t < lines * blocks;
         t += (long long)gridDim.x * blockDim.x) {
        Words c = {{first + t + 1, draw, iteration, epoch}};
        c = philox(c, key, purpose);
        const long long start = t / blocks * length, from = t % blocks * 8;
        for (int k = 0; k < 8 && from + k < length; ++k) {
            const unsigned bits = unsigned(c.v[k / 2] >> (k % 2 * 32));
            const long long at = start + from + k;
            const T m = bits >= threshold ? kept : dropped;
            mask[at] = m;
            y[at] = T(static_cast<A>(x[at]) * static_cast<A>(m));
        }
    }
}
