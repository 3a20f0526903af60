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

using std::isfinite; using std::isinf; using std::max; using std::min;

struct dim3 { unsigned x, y, z; };
static dim3 threadIdx, blockIdx, blockDim, gridDim;
struct float4 { float x, y, z, w; };

#define __global__
#define __grid_constant__
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
static unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
static unsigned atomicInc(unsigned* p, unsigned most) { unsigned old = *p; *p = old >= most ? 0 : old + 1; return old; }

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define POISON(p, n) __asan_poison_memory_region(p, n)
#define UNPOISON(p, n) __asan_unpoison_memory_region(p, n)
#define UNCHECKED __attribute__((no_sanitize("address", "undefined")))
#else
#define POISON(p, n)
#define UNPOISON(p, n)
#define UNCHECKED
#endif

// Memory of a block that a launch gives it: what lies behind it must not be touched.
static struct Shared {
    std::vector<float> floats;
    float* data() { return floats.data(); }
    void assign(size_t count) {
        UNPOISON(floats.data(), floats.size() * 4);
        floats.assign(count + 64, NAN);
        POISON(floats.data() + count, 64 * 4);
    }
} shared_floats;

// ---- threads of a block: stacks between which the host's one thread switches

enum State { READY, AT_WARP, AT_BLOCK, DONE };
static const size_t STACK = 1 << 16;
static std::vector<State> state;
static char* stacks;
static size_t current;
static void (*body)();
static unsigned long long seed = 88172645463325252ull;

static unsigned any_of(unsigned n) {
    seed ^= seed << 13; seed ^= seed >> 7; seed ^= seed << 17;
    return unsigned(seed >> 33) % n;
}

#if defined(__x86_64__)
static std::vector<void*> tops;
static void* scheduler;

// Keeps the registers that a function must keep, and goes on where another stack stopped.
__attribute__((naked, noinline)) UNCHECKED static void change(void**, void*) {
    asm("pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15; movq %rsp, (%rdi); movq %rsi, %rsp;"
        "popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp; ret");
}

static void leave() { change(&tops[current], scheduler); }
static void resume() { change(&scheduler, tops[current]); }
static void enter();

static void begin(size_t i) {
    void** top = (void**)(stacks + (i + 1) * STACK) - 2;
    *top = (void*)enter;
    top[1] = nullptr;  // where enter would return to: here ends what a sanitizer follows for its report
    for (int k = 1; k <= 6; ++k) top[-k] = nullptr;
    tops[i] = top - 6;
}
#else
#include <ucontext.h>
static std::vector<ucontext_t> tops;
static ucontext_t scheduler;
static void leave() { swapcontext(&tops[current], &scheduler); }
static void resume() { swapcontext(&scheduler, &tops[current]); }
static void enter();

static void begin(size_t i) {
    getcontext(&tops[i]);
    tops[i].uc_stack.ss_sp = stacks + i * STACK;
    tops[i].uc_stack.ss_size = STACK;
    tops[i].uc_link = nullptr;
    makecontext(&tops[i], enter, 0);
}
#endif

static void wait_at(State place) { state[current] = place; leave(); }
static void __syncthreads() { wait_at(AT_BLOCK); }
static void __syncwarp(unsigned = ~0u) { wait_at(AT_WARP); }

// A warp is 32 neighbours of one row.
template <typename V>
static V exchange(V v, unsigned at, unsigned from) {
    static V exchanged[1024];
    exchanged[at] = v;
    __syncwarp();
    const V found = exchanged[from];
    __syncwarp();
    return found;
}

static unsigned thread_number() { return threadIdx.y * blockDim.x + threadIdx.x; }

template <typename V>
static V __shfl_down_sync(unsigned, V v, int offset) {
    const unsigned at = thread_number();
    return exchange(v, at, at % 32 + offset < 32 ? at + offset : at);
}

template <typename V>
static V __shfl_xor_sync(unsigned, V v, int mask) {
    const unsigned at = thread_number();
    return exchange(v, at, at ^ mask);
}

template <typename V>
static V __shfl_sync(unsigned, V v, int lane) {
    const unsigned at = thread_number();
    return exchange(v, at, at - at % 32 + lane % 32);
}

static void enter() {
    body();
    wait_at(DONE);
}

// Let those go on who wait for others that are all there; false where nobody can.
static bool release() {
    bool moved = false, is_block = true, is_over = true;
    for (size_t w = 0; w < state.size(); w += 32) {
        size_t waiting = 0, done = 0, end = std::min(w + 32, state.size());
        for (size_t i = w; i < end; ++i) {
            waiting += state[i] == AT_WARP;
            done += state[i] == DONE;
            is_block = is_block && (state[i] == AT_BLOCK || state[i] == DONE);
        }
        is_over = is_over && done == end - w;
        if (!waiting || waiting + done != end - w) continue;
        for (size_t i = w; i < end; ++i) if (state[i] == AT_WARP) state[i] = READY;
        moved = true;
    }
    if (!is_over && is_block) {
        for (State& s : state) if (s == AT_BLOCK) s = READY;
        moved = true;
    }
    return moved;
}

// False where threads wait for each other in different places.
static bool run_block() {
    const size_t count = blockDim.x * blockDim.y;
    if (!stacks) stacks = (char*)malloc(1024 * STACK);
    if (tops.size() < count) tops.resize(count);
    state.assign(count, READY);
    static std::vector<unsigned> order;
    order.resize(count);
    for (size_t i = 0; i < count; ++i) order[i] = i, begin(i);
    do {
        for (size_t i = count - 1; i; --i) std::swap(order[i], order[any_of(i + 1)]);
        for (size_t i : order) {
            if (state[i] != READY) continue;
            current = i;
            threadIdx = {unsigned(i % blockDim.x), unsigned(i / blockDim.x), 0};
            resume();
        }
    } while (release());
    for (State s : state) if (s != DONE) return false;
    return true;
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

// 0, or which argument has another size than the kernel's, -1 for another number of them, -3 where a barrier is not met
// by all threads.
template <typename... A>
static int launch(void (*kernel)(A...), const unsigned* grid, const unsigned* block, size_t shared, void** values,
                  const size_t* sizes, size_t count) {
    int wrong = prepare(kernel, values, sizes, count, std::index_sequence_for<A...>());
    if (wrong) return wrong;
    gridDim = {grid[0], grid[1], 1};
    blockDim = {block[0], block[1], 1};
    shared_floats.assign(shared / 4);
    std::vector<unsigned> order(grid[0] * grid[1]);
    for (unsigned i = 0; i < order.size(); ++i) order[i] = i;
    for (size_t i = order.size() - 1; i; --i) std::swap(order[i], order[any_of(i + 1)]);
    for (unsigned i : order) {
        blockIdx = {i % grid[0], i / grid[0], 0};
        if (!run_block()) return -3;
    }
    return 0;
}
