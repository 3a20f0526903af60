// Rows of K neighbouring elements, a warp for each: softmax and its logarithm, layer normalization; dropout; and the parts of
// a Transformer between its products. A: the type of sums over T; G: that of gamma and beta; B: that of biases.

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

// What a draw of random bits begins with: lines of bits follow each other, each with words of its own, four for 8 elements.
// The six numbers come from `declared` in a captured step, where that is written before each replay.
struct Draw { unsigned long long first, draw, iteration, epoch, key, purpose; };

__device__ Draw drawn(Draw d, const unsigned long long* declared) {
    if (declared) d = {declared[0], declared[1], declared[2], declared[3], declared[4], declared[5]};
    return d;
}

__device__ Words words_of(const Draw& d, long long group) {
    Words c = {{d.first + group + 1, d.draw, d.iteration, d.epoch}};
    return philox(c, d.key, d.purpose);
}

__device__ bool is_kept(const Words& c, int k, unsigned threshold) {
    return unsigned(c.v[k / 2] >> (k % 2 * 32)) >= threshold;
}

#define EACH(i, n) \
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < (n); i += (long long)gridDim.x * blockDim.x)

// Lines of `length` elements: 0 where 32 random bits are below the threshold, else `scale`; a thread makes 8 elements.
template <typename T, typename A>
__global__ void dropout(const T* x, T* y, T* mask, long long lines, long long length, unsigned long long first,
                        unsigned long long draw, unsigned long long iteration, unsigned long long epoch,
                        unsigned long long key, unsigned long long purpose, unsigned threshold, double scale,
                        const unsigned long long* declared) {
    const Draw bits = drawn({first, draw, iteration, epoch, key, purpose}, declared);
    const long long groups = (length + 7) / 8;
    const T kept = T(A(scale)), dropped = T(A(0));
    EACH(t, lines * groups) {
        const Words c = words_of(bits, t);
        const long long start = t / groups * length, from = t % groups * 8;
        for (int k = 0; k < 8 && from + k < length; ++k) {
            const long long at = start + from + k;
            const T m = is_kept(c, k, threshold) ? kept : dropped;
            mask[at] = m;
            y[at] = T(static_cast<A>(x[at]) * static_cast<A>(m));
        }
    }
}

// ---- what follows on a linear map whose result z still lacks its bias b, which may be null

#define EACH_GROUP(g, K) for (int g = threadIdx.x % 32; g < ((K) + 7) / 8; g += 32)
#define EACH_OF_GROUP(k, g, K) for (int k = (g) * 8; k < (g) * 8 + 8 && k < (K); ++k)

template <typename A, typename T, typename B>
__device__ A with_bias(T z, const B* b, int k) {
    return b ? static_cast<A>(T(static_cast<A>(z) + static_cast<A>(b[k]))) : static_cast<A>(z);
}

// z = max(z + b, 0) times the mask of a dropout, as by `dropout` of lines of K elements; a threshold of 0 drops nothing
template <typename T, typename B, typename A>
__global__ void relu_dropout(T* z, const B* b, long long lines, int K, unsigned long long first, unsigned long long draw,
                             unsigned long long iteration, unsigned long long epoch, unsigned long long key,
                             unsigned long long purpose, unsigned threshold, double scale,
                             const unsigned long long* declared) {
    const Draw bits = drawn({first, draw, iteration, epoch, key, purpose}, declared);
    const A factor = static_cast<A>(T(A(scale)));
    const long long groups = (K + 7) / 8;
    EACH(t, lines * groups) {
        Words c = {};
        if (threshold) c = words_of(bits, t);
        const long long start = t / groups * K;
        const int group = int(t % groups);
        EACH_OF_GROUP(k, group, K) {
            const A h = with_bias<A>(z[start + k], b, k);
            z[start + k] = T((h <= 0 ? A(0) : h) * (is_kept(c, k % 8, threshold) ? factor : A(0)));
        }
    }
}

// The dropped z + b, where `mask` notes what is kept, plus r
template <typename T, typename B, typename A>
__device__ T sum_with_dropped(T z, const B* b, T r, unsigned char* mask, int k, bool kept, A factor) {
    A h = with_bias<A>(z, b, k);
    if (mask) {
        mask[k] = kept;
        h = static_cast<A>(T(h * (kept ? factor : A(0))));
    }
    return T(static_cast<A>(r) + h);
}

template <typename T, typename B, typename A>
__global__ void dropout_add(T* z, const B* b, const T* r, unsigned char* mask, long long lines, int K,
                            unsigned long long first, unsigned long long draw, unsigned long long iteration,
                            unsigned long long epoch, unsigned long long key, unsigned long long purpose,
                            unsigned threshold, double scale, const unsigned long long* declared) {
    const Draw bits = drawn({first, draw, iteration, epoch, key, purpose}, declared);
    const A factor = static_cast<A>(T(A(scale)));
    const long long groups = (K + 7) / 8;
    EACH(t, lines * groups) {
        Words c = {};
        if (mask) c = words_of(bits, t);
        const long long start = t / groups * K;
        const int group = int(t % groups);
        EACH_OF_GROUP(k, group, K)
            z[start + k] = sum_with_dropped<T, B, A>(z[start + k], b, r[start + k], mask ? mask + start : 0, k,
                                                     is_kept(c, k % 8, threshold), factor);
    }
}

// gz = gy times the mask and its scale
template <typename T, typename A>
__global__ void masked(const T* gy, const unsigned char* mask, T* gz, long long size, double scale) {
    const A factor = static_cast<A>(T(A(scale)));
    EACH(i, size) gz[i] = T(static_cast<A>(gy[i]) * (mask[i] ? factor : A(0)));
}

// z becomes the sum of r and the dropped z + b, y its layer normalization. Each thread reads again what it wrote itself.
template <typename T, typename B, typename G, typename A>
__global__ void ln_of_sum(T* z, const B* b, const T* r, unsigned char* mask, const G* gamma, const G* beta, T* y, A* mean,
                          A* var, long long rows, int K, double eps, unsigned long long first, unsigned long long draw,
                          unsigned long long iteration, unsigned long long epoch, unsigned long long key,
                          unsigned long long purpose, unsigned threshold, double scale,
                          const unsigned long long* declared) {
    const Draw bits = drawn({first, draw, iteration, epoch, key, purpose}, declared);
    const A factor = static_cast<A>(T(A(scale)));
    const int groups = (K + 7) / 8;
    EACH_ROW(row, rows) {
        T* x = z + row * K;
        const T* added = r + row * K;
        A mu = 0, spread = 0;
        EACH_GROUP(g, K) {
            Words c = {};
            if (mask) c = words_of(bits, row * groups + g);
            EACH_OF_GROUP(k, g, K) {
                x[k] = sum_with_dropped<T, B, A>(x[k], b, added[k], mask ? mask + row * K : 0, k,
                                                 is_kept(c, k % 8, threshold), factor);
                mu += static_cast<A>(x[k]);
            }
        }
        mu = sum_of_warp(mu) / K;
        EACH_GROUP(g, K) EACH_OF_GROUP(k, g, K) {
            const A d = static_cast<A>(x[k]) - mu;
            spread += d * d;
        }
        spread = sum_of_warp(spread) / K;
        const A inverse = 1 / sqrt(spread + A(eps));
        EACH_GROUP(g, K) EACH_OF_GROUP(k, g, K)
            y[row * K + k] = T((static_cast<A>(x[k]) - mu) * inverse * static_cast<A>(gamma[k]) + static_cast<A>(beta[k]));
        if (threadIdx.x % 32 == 0) mean[row] = mu, var[row] = spread;
    }
}

// gx as by ln_backward, and gz, that times the mask and its scale
template <typename T, typename G, typename A>
__global__ void ln_of_sum_backward(const T* x, const G* gamma, const A* mean, const A* var, const T* gy,
                                   const unsigned char* mask, T* gx, T* gz, long long rows, int K, double eps,
                                   double scale) {
    const A factor = static_cast<A>(T(A(scale)));
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
            const T made = T((g - (sum + (static_cast<A>(x[at + k]) - mu) * inverse * along)) * inverse);
            gx[at + k] = made;
            gz[at + k] = T(static_cast<A>(made) * (mask[at + k] ? factor : A(0)));
        }
    }
}

// ---- attention

// Scores s (B, H, L, S) become their softmax over the keys that are seen, zeros where none is; w is that with some dropped,
// or null. Key k of query q is seen where `keys`, if there are any, hold, and k <= q if `is_causal`; `added` is added to
// the scores. The steps of both are in elements, by axis.
template <typename T, typename A>
__global__ void attention_weights(T* s, T* w, const unsigned char* keys, const T* added, long long rows, int S, int L,
                                  int H, int is_causal, long long keys_b, long long keys_h, long long keys_q,
                                  long long keys_k, long long added_b, long long added_h, long long added_q,
                                  long long added_k, unsigned long long first, unsigned long long draw,
                                  unsigned long long iteration, unsigned long long epoch, unsigned long long key,
                                  unsigned long long purpose, unsigned threshold, double scale,
                                  const unsigned long long* declared) {
    const Draw bits = drawn({first, draw, iteration, epoch, key, purpose}, declared);
    const A factor = static_cast<A>(T(A(scale)));
    const int groups = (S + 7) / 8;
    EACH_ROW(row, rows) {
        const long long q = row % L, h = row / L % H, b = row / L / H;
        const unsigned char* of_keys = keys ? keys + (b * keys_b + h * keys_h + q * keys_q) : 0;
        const T* more = added ? added + (b * added_b + h * added_h + q * added_q) : 0;
        const int end = is_causal && q + 1 < S ? int(q + 1) : S;
        T* x = s + row * S;
        auto sees = [&](int k) { return k < end && (!of_keys || of_keys[k * keys_k]); };
        auto score = [&](int k) {
            const A v = static_cast<A>(x[k]);
            return more ? static_cast<A>(T(v + static_cast<A>(more[k * added_k]))) : v;
        };
        A largest = -A(__int_as_float(0x7f800000)), sum = 0;
        bool sees_some = false;
        EACH_OF_ROW(k, end) if (sees(k)) {
            const A v = score(k);
            if (v > largest || v != v) largest = v;
            sees_some = true;
        }
        largest = largest_of_warp(largest);
        sees_some = sum_of_warp(int(sees_some));
        EACH_OF_ROW(k, end) if (sees(k)) sum += exp(score(k) - largest);
        sum = sum_of_warp(sum);
        EACH_GROUP(g, S) {
            Words c = {};
            if (w) c = words_of(bits, row * groups + g);
            EACH_OF_GROUP(k, g, S) {
                const T p = sees_some && sees(k) ? T(exp(score(k) - largest) / sum) : T(A(0));
                x[k] = p;
                if (w) w[row * S + k] = T(static_cast<A>(p) * (is_kept(c, k % 8, threshold) ? factor : A(0)));
            }
        }
    }
}

// The mask of a dropout of weights (rows, S): 0 or the factor.
template <typename T, typename A>
__global__ void attention_mask(T* mask, long long rows, int S, unsigned long long first, unsigned long long draw,
                               unsigned long long iteration, unsigned long long epoch, unsigned long long key,
                               unsigned long long purpose, unsigned threshold, double scale,
                               const unsigned long long* declared) {
    const Draw bits = drawn({first, draw, iteration, epoch, key, purpose}, declared);
    const T factor = T(A(scale));
    const int groups = (S + 7) / 8;
    EACH_ROW(row, rows) {
        EACH_GROUP(g, S) {
            const Words c = words_of(bits, row * groups + g);
            EACH_OF_GROUP(k, g, S) mask[row * S + k] = is_kept(c, k % 8, threshold) ? factor : T(A(0));
        }
    }
}

// g, the gradient of w, becomes that of the scores: w g - p sum(w g)
template <typename T, typename A>
__global__ void attention_weights_backward(const T* p, const T* w, T* g, long long rows, int S) {
    EACH_ROW(r, rows) {
        const long long at = r * S;
        A sum = 0;
        EACH_OF_ROW(k, S) sum += static_cast<A>(w[at + k]) * static_cast<A>(g[at + k]);
        sum = sum_of_warp(sum);
        EACH_OF_ROW(k, S)
            g[at + k] = T(static_cast<A>(w[at + k]) * static_cast<A>(g[at + k]) - static_cast<A>(p[at + k]) * sum);
    }
}

template <typename T> struct alignas(16) Pack {
    static const int N = 16 / sizeof(T);
    T v[N];
};

// One of up to three arrays of heads of D elements: the place of an element of x (B, L, H, D) in y (B, H, L, D).
__device__ long long in_heads(long long i, long long L, int H, int D) {
    const int d = int(i % D);
    const long long row = i / D, h = row % H, l = row / H % L, b = row / H / L;
    return ((b * H + h) * L + l) * D + d;
}

template <typename T, typename B, typename A>
__device__ void split(const T* x, const B* b, T* y, long long i, long long L, int H, int D, int num) {
    const long long to = in_heads(i, L, H, D);
    const int column = int(i % ((long long)H * D));
    if (num == 1) {
        y[to] = T(with_bias<A>(x[i], b, column));
        return;
    }
    Pack<T> pack = *(const Pack<T>*)(x + i);
    for (int k = 0; k < Pack<T>::N; ++k) pack.v[k] = T(with_bias<A>(pack.v[k], b, column + k));
    *(Pack<T>*)(y + to) = pack;
}

// Up to three arrays x (B, L, H, D), plus biases (H D) that may be null, to (B, H, L, D); n elements, of which a thread takes
// `num` neighbours at once, 1 or 16 bytes.
template <typename T, typename B, typename A>
__global__ void split_heads(const T* x0, const T* x1, const T* x2, const B* b0, const B* b1, const B* b2, T* y0, T* y1,
                            T* y2, long long n0, long long n1, long long n2, long long L0, long long L1, long long L2,
                            int H, int D0, int D1, int D2, int num) {
    EACH(t, (n0 + n1 + n2) / num) {
        const long long i = t * num;
        if (i < n0) split<T, B, A>(x0, b0, y0, i, L0, H, D0, num);
        else if (i < n0 + n1) split<T, B, A>(x1, b1, y1, i - n0, L1, H, D1, num);
        else split<T, B, A>(x2, b2, y2, i - n0 - n1, L2, H, D2, num);
    }
}

template <typename T>
__device__ void merge(const T* y, T* x, long long i, long long L, int H, int D, int num) {
    const long long from = in_heads(i, L, H, D);
    if (num == 1) x[i] = y[from];
    else *(Pack<T>*)(x + i) = *(const Pack<T>*)(y + from);
}

// The way back, without biases
template <typename T>
__global__ void merge_heads(const T* y0, const T* y1, const T* y2, T* x0, T* x1, T* x2, long long n0, long long n1,
                            long long n2, long long L0, long long L1, long long L2, int H, int D0, int D1, int D2,
                            int num) {
    EACH(t, (n0 + n1 + n2) / num) {
        const long long i = t * num;
        if (i < n0) merge(y0, x0, i, L0, H, D0, num);
        else if (i < n0 + n1) merge(y1, x1, i - n0, L1, H, D1, num);
        else merge(y2, x2, i - n0 - n1, L2, H, D2, num);
    }
}
