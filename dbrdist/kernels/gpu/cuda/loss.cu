// The mean cross entropy of rows of scores x and integer labels t: a warp for each row.
// A: the type of sums over T; L: that of labels; labels equal to `ignored` count nothing, those of no class give NaN.

#define EACH_ROW(r, rows) \
    for (int r = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; r < (rows); r += gridDim.x * (blockDim.x / 32))

template <typename A>
__device__ A infinity() { return __int_as_float(0x7f800000); }

template <typename A>
__device__ A nan_of() { return __int_as_float(0x7fc00000); }

template <typename A>
__device__ A sum_of_warp(A v) {
    for (int offset = 16; offset; offset /= 2) v += __shfl_xor_sync(~0u, v, offset);
    return v;
}

template <typename A>
__device__ A largest_of_warp(A v) {
    for (int offset = 16; offset; offset /= 2) v = fmax(v, __shfl_xor_sync(~0u, v, offset));
    return v;
}

// y: the sum of the losses over `divisor`, or where that is 0 over the number of labels that count; scale: 1 over it
template <typename T, typename L, typename A>
__device__ void finish(const L* t, const A* losses, T* y, A* scale, int rows, long long ignored, long long divisor) {
    __shared__ A totals[32];
    __shared__ int counts[32];
    A total = 0;
    int count = 0, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int r = threadIdx.x; r < rows; r += blockDim.x) {
        total += losses[r];
        count += t[r] != ignored;
    }
    total = sum_of_warp(total);
    count = sum_of_warp(count);
    if (lane == 0) totals[warp] = total, counts[warp] = count;
    __syncthreads();
    if (warp) return;
    bool is_there = lane < blockDim.x / 32;
    total = sum_of_warp(is_there ? totals[lane] : A(0));
    count = sum_of_warp(is_there ? counts[lane] : 0);
    if (lane) return;
    A over = divisor ? A(divisor) : A(count > 1 ? count : 1);
    y[0] = T(total / over);
    scale[0] = 1 / over;
}

template <typename T, typename L, typename A>
__global__ void cross_entropy(const T* x, const L* t, A* largests, A* sums, A* losses, T* y, A* scale, int rows,
                              int classes, long long ignored, long long divisor) {
    EACH_ROW(r, rows) {
        const T* row = x + (long long)r * classes;
        A largest = -infinity<A>(), sum = 0;
        for (int k = threadIdx.x % 32; k < classes; k += 32) largest = fmax(largest, static_cast<A>(row[k]));
        largest = largest_of_warp(largest);
        if (isinf(largest)) largest = largest > 0 ? 3.402823466e38f : 0;
        for (int k = threadIdx.x % 32; k < classes; k += 32) sum += exp(static_cast<A>(row[k]) - largest);
        sum = sum_of_warp(sum);
        if (threadIdx.x % 32) continue;
        L label = t[r];
        bool is_class = label >= 0 && label < classes;
        largests[r] = largest, sums[r] = sum;
        losses[r] = label == ignored ? A(0)
                    : is_class       ? log(sum) - (static_cast<A>(row[label]) - largest)
                                     : nan_of<A>();
    }
    if (gridDim.x > 1) return;  // then mean_of_losses follows
    __syncthreads();
    finish(t, losses, y, scale, rows, ignored, divisor);
}

template <typename T, typename L, typename A>
__global__ void mean_of_losses(const L* t, const A* losses, T* y, A* scale, int rows, long long ignored,
                               long long divisor) {
    finish(t, losses, y, scale, rows, ignored, divisor);
}

// gx = (softmax(x) - onehot(t)) gy scale
template <typename T, typename L, typename A>
__global__ void cross_entropy_backward(const T* x, const L* t, const A* largests, const A* sums, const T* gy,
                                       const A* scale, T* gx, int rows, int classes, long long ignored) {
    A factor = static_cast<A>(gy[0]) * scale[0];
    EACH_ROW(r, rows) {
        long long start = (long long)r * classes;
        L label = t[r];
        A largest = largests[r], sum = sums[r];
        bool is_class = label >= 0 && label < classes;
        for (int k = threadIdx.x % 32; k < classes; k += 32) {
            A p = exp(static_cast<A>(x[start + k]) - largest) / sum;
            A g = is_class ? (p - (k == label ? A(1) : A(0))) * factor : nan_of<A>();
            gx[start + k] = label == ignored ? T(0.0f) : T(g);
        }
    }
}
