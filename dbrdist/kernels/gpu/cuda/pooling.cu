// Pooling of channels-last images. Legend: N H W C input, P Q rows and columns of the output; kernel kh kw, stride sh sw,
// padding ph pw. A thread has V neighbouring channels of one pixel. Gradients are gathered, so that sums have one order.

template <typename T, int V>
struct alignas(sizeof(T) * V) Pack { T v[V]; };

template <typename T, int V, typename I>
__global__ void max_forward(const T* x, T* y, I* index, long long size, int H, int W, int C, int P, int Q, int kh, int kw,
                            int sh, int sw, int ph, int pw) {
    for (long long t = blockIdx.x * (long long)blockDim.x + threadIdx.x; t < size; t += (long long)gridDim.x * blockDim.x) {
        const int groups = C / V, c = (t % groups) * V;
        long long rest = t / groups;
        const int q = rest % Q;
        rest /= Q;
        const int p = rest % P;
        const long long n = rest / P;
        float best[V];
        int where[V];
#pragma unroll
        for (int k = 0; k < V; ++k) { best[k] = __int_as_float(0xff800000); where[k] = -1; }
        for (int u = 0; u < kh; ++u) {
            const int i = p * sh - ph + u;
            if (i < 0 || i >= H) continue;
            for (int v = 0; v < kw; ++v) {
                const int j = q * sw - pw + v;
                if (j < 0 || j >= W) continue;
                const Pack<T, V> pack = *reinterpret_cast<const Pack<T, V>*>(x + ((n * H + i) * W + j) * C + c);
#pragma unroll
                for (int k = 0; k < V; ++k) {
                    const float w = float(pack.v[k]);
                    // NaN is largest; the first pixel counts, also where it is -inf
                    if (where[k] < 0 || (!(w <= best[k]) && best[k] == best[k])) { best[k] = w; where[k] = u * kw + v; }
                }
            }
        }
        Pack<T, V> out;
        Pack<I, V> at;
#pragma unroll
        for (int k = 0; k < V; ++k) { out.v[k] = T(best[k]); at.v[k] = I(max(where[k], 0)); }
        *reinterpret_cast<Pack<T, V>*>(y + t * V) = out;
        *reinterpret_cast<Pack<I, V>*>(index + t * V) = at;
    }
}

template <typename T, int V>
__global__ void average_forward(const T* x, T* y, long long size, int H, int W, int C, int P, int Q, int kh, int kw, int sh,
                                int sw, int ph, int pw) {
    for (long long t = blockIdx.x * (long long)blockDim.x + threadIdx.x; t < size; t += (long long)gridDim.x * blockDim.x) {
        const int groups = C / V, c = (t % groups) * V;
        long long rest = t / groups;
        const int q = rest % Q;
        rest /= Q;
        const int p = rest % P;
        const long long n = rest / P;
        float sum[V];
#pragma unroll
        for (int k = 0; k < V; ++k) sum[k] = 0;
        for (int u = 0; u < kh; ++u) {
            const int i = p * sh - ph + u;
            if (i < 0 || i >= H) continue;
            for (int v = 0; v < kw; ++v) {
                const int j = q * sw - pw + v;
                if (j < 0 || j >= W) continue;
                const Pack<T, V> pack = *reinterpret_cast<const Pack<T, V>*>(x + ((n * H + i) * W + j) * C + c);
#pragma unroll
                for (int k = 0; k < V; ++k) sum[k] += float(pack.v[k]);
            }
        }
        Pack<T, V> out;
#pragma unroll
        for (int k = 0; k < V; ++k) out.v[k] = T(sum[k] / (kh * kw));
        *reinterpret_cast<Pack<T, V>*>(y + t * V) = out;
    }
}

// Every input pixel looks at the windows that see it. MAX: it takes gy where it was the largest; else gy / (kh kw).
template <typename T, int V, typename I, int MAX>
__global__ void backward(const T* gy, const I* index, T* gx, long long size, int H, int W, int C, int P, int Q, int kh,
                         int kw, int sh, int sw, int ph, int pw) {
    for (long long t = blockIdx.x * (long long)blockDim.x + threadIdx.x; t < size; t += (long long)gridDim.x * blockDim.x) {
        const int groups = C / V, c = (t % groups) * V;
        long long rest = t / groups;
        const int j = rest % W + pw;
        rest /= W;
        const int i = rest % H + ph;
        const long long n = rest / H;
        const int top = i < kh ? 0 : (i - kh) / sh + 1, bottom = min(i / sh, P - 1);
        const int left = j < kw ? 0 : (j - kw) / sw + 1, right = min(j / sw, Q - 1);
        float sum[V];
#pragma unroll
        for (int k = 0; k < V; ++k) sum[k] = 0;
        for (int p = top; p <= bottom; ++p)
            for (int q = left; q <= right; ++q) {
                const long long at = ((n * P + p) * Q + q) * C + c;
                const Pack<T, V> pack = *reinterpret_cast<const Pack<T, V>*>(gy + at);
                if (MAX) {
                    const int here = (i - p * sh) * kw + j - q * sw;
                    const Pack<I, V> where = *reinterpret_cast<const Pack<I, V>*>(index + at);
#pragma unroll
                    for (int k = 0; k < V; ++k) if (int(where.v[k]) == here) sum[k] += float(pack.v[k]);
                } else {
#pragma unroll
                    for (int k = 0; k < V; ++k) sum[k] += float(pack.v[k]);
                }
            }
        Pack<T, V> out;
#pragma unroll
        for (int k = 0; k < V; ++k) out.v[k] = T(MAX ? sum[k] : sum[k] / (kh * kw));
        *reinterpret_cast<Pack<T, V>*>(gx + t * V) = out;
    }
}
