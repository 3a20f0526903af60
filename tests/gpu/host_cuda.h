// What the files of kernels/gpu/cuda need of CUDA, for a C++ compiler of the host: the threads of a block are contexts that
// take turns at its barriers, in another order each time, and blocks run one after the other, in any order.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <cstdlib>
#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>
#include <ucontext.h>

using std::isfinite; using std::isinf; using std::max; using std::min;

struct dim3 { unsigned x, y, z; };
static dim3 threadIdx, blockIdx, blockDim, gridDim;
struct float4 { float x, y, z, w; };

#define __global__
#define __device__ static inline
#define __forceinline__
#define __restrict__
#define __launch_bounds__(...)
#define __shared__ static

struct __half {
    _Float16 v;
    __half() = default;
    explicit __half(float f) : v(_Float16(f)) {}
    operator float() const { return float(v); }
};

struct __nv_bfloat16 {
    uint16_t v;
    __nv_bfloat16() = default;
    explicit __nv_bfloat16(float f) {
        uint32_t bits;
        memcpy(&bits, &f, 4);
        v = std::isnan(f) ? 0x7fff : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    }
    operator float() const {
        uint32_t bits = uint32_t(v) << 16;
        float f;
        memcpy(&f, &bits, 4);
        return f;
    }
};

static float __int_as_float(int i) { float f; memcpy(&f, &i, 4); return f; }
template <typename T> static T __ldcg(const T* p) { return *p; }
static void __threadfence() {}
static unsigned atomicInc(unsigned* p, unsigned most) { unsigned old = *p; *p = old >= most ? 0 : old + 1; return old; }

static std::vector<float> shared_floats;
static ucontext_t scheduler;
static std::vector<ucontext_t> fibers;
static std::vector<char> is_done;
static std::vector<char> stacks;
static size_t current;
static void (*body)();

static void __syncthreads() { swapcontext(&fibers[current], &scheduler); }

// A warp is 32 neighbours of one row; the whole block must call it, as all take their turn between two barriers.
static float exchanged[1024];
static float __shfl_down_sync(unsigned, float v, int offset) {
    const unsigned at = threadIdx.y * blockDim.x + threadIdx.x, lane = at % 32;
    exchanged[at] = v;
    __syncthreads();
    float found = exchanged[lane + offset < 32 ? at + offset : at];
    __syncthreads();
    return found;
}

// As above, but only whole warps must call it: others may be further on, or done.
template <typename V>
static V __shfl_xor_sync(unsigned, V v, int mask) {
    static V exchanged[1024];
    const unsigned at = threadIdx.y * blockDim.x + threadIdx.x;
    exchanged[at] = v;
    __syncthreads();
    const V found = exchanged[at ^ mask];
    __syncthreads();
    return found;
}

static void enter() {
    body();
    is_done[current] = 1;
    swapcontext(&fibers[current], &scheduler);
}

static void run_block() {
    const size_t count = blockDim.x * blockDim.y, size = 1 << 14;
    if (fibers.size() < count) { fibers.resize(count); stacks.resize(count * size); }
    is_done.assign(count, 0);
    std::vector<size_t> order(count);
    for (size_t i = 0; i < count; ++i) {
        order[i] = i;
        getcontext(&fibers[i]);
        fibers[i].uc_stack.ss_sp = &stacks[i * size];
        fibers[i].uc_stack.ss_size = size;
        fibers[i].uc_link = nullptr;
        makecontext(&fibers[i], enter, 0);
    }
    for (size_t left = count; left;) {
        for (size_t i = count - 1; i; --i) std::swap(order[i], order[rand() % (i + 1)]);
        for (size_t i : order) {
            if (is_done[i]) continue;
            current = i;
            threadIdx = {unsigned(i % blockDim.x), unsigned(i / blockDim.x), 0};
            swapcontext(&scheduler, &fibers[i]);
            left -= is_done[i];
        }
    }
}

template <typename... A> struct Call {
    static std::tuple<A...> arguments;
    static void (*kernel)(A...);
    static void run() { std::apply(kernel, arguments); }
};
template <typename... A> std::tuple<A...> Call<A...>::arguments;
template <typename... A> void (*Call<A...>::kernel)(A...);

template <typename... A, size_t... I>
static int prepare(void (*kernel)(A...), void** values, const size_t* sizes, size_t count, std::index_sequence<I...>) {
    const size_t wanted[] = {sizeof(A)...};
    if (count != sizeof...(A)) return -1;
    for (size_t i = 0; i < count; ++i) if (sizes[i] != wanted[i]) return int(i) + 1;
    Call<A...>::arguments = std::tuple<A...>(*(A*)values[I]...);
    Call<A...>::kernel = kernel;
    body = Call<A...>::run;
    return 0;
}

// 0, or which argument has another size than the kernel's, or -1 for another number of them.
template <typename... A>
static int launch(void (*kernel)(A...), const unsigned* grid, const unsigned* block, size_t shared, void** values,
                  const size_t* sizes, size_t count) {
    int wrong = prepare(kernel, values, sizes, count, std::index_sequence_for<A...>());
    if (wrong) return wrong;
    gridDim = {grid[0], grid[1], 1};
    blockDim = {block[0], block[1], 1};
    shared_floats.assign(shared / 4 + 1, NAN);
    std::vector<unsigned> order(grid[0] * grid[1]);
    for (unsigned i = 0; i < order.size(); ++i) order[i] = i;
    for (size_t i = order.size() - 1; i; --i) std::swap(order[i], order[rand() % (i + 1)]);
    for (unsigned i : order) {
        blockIdx = {i % grid[0], i / grid[0], 0};
        run_block();
    }
    return 0;
}
