// Sums, rectified linear units, biases and their gradients; A is the type in which sums over T run.

template <typename T> struct Wide { typedef float type; };
template <> struct Wide<double> { typedef double type; };

template <typename T> struct alignas(16) Pack {
    static const int N = 16 / sizeof(T);
    T v[N];
};

template <typename T>
__device__ bool is_aligned(const T* p) { return (size_t)p % sizeof(Pack<T>) == 0; }

#define EACH(i, n) \
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < (n); i += (long long)gridDim.x * blockDim.x)

template <typename T, typename F, typename... Packs>
__device__ Pack<T> mapped(F f, Packs... xs) {
    Pack<T> y;
#pragma unroll
    for (int k = 0; k < Pack<T>::N; ++k) y.v[k] = f(xs.v[k]...);
    return y;
}

// y = f(xs), 16 bytes at a time where all arrays begin at a multiple of that; y may be one of xs
template <typename T, typename F, typename... Pointers>
__device__ void map(F f, T* y, long long size, Pointers... xs) {
    long long packs = (is_aligned(y) && ... && is_aligned(xs)) ? size / Pack<T>::N : 0, done = packs * Pack<T>::N;
    EACH(i, packs) ((Pack<T>*)y)[i] = mapped<T>(f, ((const Pack<T>*)xs)[i]...);
    EACH(i, size - done) y[done + i] = f(xs[done + i]...);
}

// max(x, 0); NaN stays
template <typename T>
__global__ void relu_forward(const T* x, T* y, long long size) {
    typedef typename Wide<T>::type A;
    map([](T x) { return static_cast<A>(x) <= 0 ? T(0.0f) : x; }, y, size, x);
}

// gy where y, the output of a ReLU, is not 0
template <typename T>
__device__ T passed(T y, T gy) { return static_cast<typename Wide<T>::type>(y) != 0 ? gy : T(0.0f); }

template <typename T>
__global__ void relu_backward(const T* y, const T* gy, T* gx, long long size) {
    map([](T y, T gy) { return passed(y, gy); }, gx, size, y, gy);
}

template <typename T>
__device__ T sum_of(T a, T b) {
    typedef typename Wide<T>::type A;
    return T(static_cast<A>(a) + static_cast<A>(b));
}

template <typename T>
__global__ void add(const T* a, const T* b, T* y, long long size) {
    map([](T a, T b) { return sum_of(a, b); }, y, size, a, b);
}

// a + b where y is not 0; gx may be a or b
template <typename T>
__global__ void relu_backward_of_sum(const T* y, const T* a, const T* b, T* gx, long long size) {
    map([](T y, T a, T b) { return passed(y, sum_of(a, b)); }, gx, size, y, a, b);
}

// gy times a scale where y, the dropped output of a ReLU, is not 0: neither rectified nor dropped
template <typename T>
__global__ void relu_dropout_backward(const T* y, const T* gy, T* gx, long long size, double scale) {
    typedef typename Wide<T>::type A;
    const A factor = static_cast<A>(T(A(scale)));
    map([factor](T y, T gy) { return passed(y, T(static_cast<A>(gy) * factor)); }, gx, size, y, gy);
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
