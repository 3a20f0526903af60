// Rectified linear units, biases and their gradients; A is the type in which sums over T run.

template <typename T> struct Wide { typedef float type; };
template <> struct Wide<double> { typedef double type; };

template <typename T> struct alignas(4 * sizeof(T)) Four { T v[4]; };

template <typename T>
__device__ bool is_aligned(const T* p) { return (size_t)p % sizeof(Four<T>) == 0; }

#define EACH(i, n) \
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < (n); i += (long long)gridDim.x * blockDim.x)

// max(x, 0); NaN stays
template <typename T>
__device__ T rectified(T x) { return static_cast<typename Wide<T>::type>(x) <= 0 ? T(0.0f) : x; }

template <typename T>
__global__ void relu_forward(const T* x, T* y, long long size) {
    long long fours = is_aligned(x) && is_aligned(y) ? size / 4 : 0;
    EACH(i, fours) {
        Four<T> a = ((const Four<T>*)x)[i], b;
        for (int k = 0; k < 4; ++k) b.v[k] = rectified(a.v[k]);
        ((Four<T>*)y)[i] = b;
    }
    EACH(i, size - 4 * fours) y[4 * fours + i] = rectified(x[4 * fours + i]);
}

// gy where y, the output of a ReLU, is not 0
template <typename T>
__device__ T passed(T y, T gy) { return static_cast<typename Wide<T>::type>(y) != 0 ? gy : T(0.0f); }

template <typename T>
__global__ void relu_backward(const T* y, const T* gy, T* gx, long long size) {
    long long fours = is_aligned(y) && is_aligned(gy) && is_aligned(gx) ? size / 4 : 0;
    EACH(i, fours) {
        Four<T> a = ((const Four<T>*)y)[i], b = ((const Four<T>*)gy)[i];
        for (int k = 0; k < 4; ++k) b.v[k] = passed(a.v[k], b.v[k]);
        ((Four<T>*)gx)[i] = b;
    }
    EACH(i, size - 4 * fours) gx[4 * fours + i] = passed(y[4 * fours + i], gy[4 * fours + i]);
}

// y (rows, columns) += b (columns)
template <typename T, typename B>
__global__ void add_bias(T* y, const B* b, long long size, int columns) {
    typedef typename Wide<T>::type A;
    EACH(i, size) y[i] = T(static_cast<A>(y[i]) + static_cast<A>(b[i % columns]));
}

// out (columns): the sums of x (rows, columns) over the rows, by blocks of 32 columns and 32 rows at a time
template <typename T, typename O>
__global__ void column_sums(const T* x, O* out, int rows, int columns) {
    typedef typename Wide<T>::type A;
    __shared__ A parts[32][33];
    int c = blockIdx.x * 32 + threadIdx.x;
    A sum = 0;
    if (c < columns)
        for (int r = threadIdx.y; r < rows; r += 32) sum += static_cast<A>(x[(long long)r * columns + c]);
    parts[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    sum = parts[threadIdx.x][threadIdx.y];  // a warp adds one column
    for (int offset = 16; offset; offset /= 2) sum += __shfl_down_sync(~0u, sum, offset);
    c = blockIdx.x * 32 + threadIdx.y;
    if (threadIdx.x == 0 && c < columns) out[c] = O(sum);
}
