// The threads of a CUDA kernel on the host: those of a block are contexts that take turns at its barriers, in another
// order each time, and blocks run one after the other, in any order. Sanitizers do not look at what happens here: it is
// done for each thread and barrier.
#include "host_cuda.h"
#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define POISON(p, n) __asan_poison_memory_region(p, n)
#define UNPOISON(p, n) __asan_unpoison_memory_region(p, n)
#else
#define POISON(p, n)
#define UNPOISON(p, n)
#endif

dim3 threadIdx, blockIdx, blockDim, gridDim;
float* shared_floats;

// What lies behind a block's memory must not be touched.
UNCHECKED static void share(size_t count) {
    const size_t behind = 64;
    static size_t size;
    if (shared_floats) UNPOISON(shared_floats, size * 4);
    if (size < count + behind) {
        size = count + behind;
        free(shared_floats);
        shared_floats = (float*)malloc(size * 4);
    }
    for (size_t i = 0; i < count; ++i) shared_floats[i] = NAN;
    POISON(shared_floats + count, (size - count) * 4);
}

// ---- threads of a block: stacks between which the host's one thread switches

static const size_t STACK = 1 << 16, MOST = 1024;
static State state[MOST];
static char* stacks;
static size_t current, count;
static void (*body)();
static unsigned long long seed = 88172645463325252ull;

UNCHECKED static unsigned any_of(unsigned n) {
    seed ^= seed << 13; seed ^= seed >> 7; seed ^= seed << 17;
    return unsigned(seed >> 33) % n;
}

// Numbers from 0 on in any order.
UNCHECKED static void shuffle(unsigned* order, size_t n) {
    for (size_t i = n - 1; i && i < n; --i) {
        const size_t j = any_of(i + 1);
        const unsigned kept = order[i];
        order[i] = order[j];
        order[j] = kept;
    }
}

#if defined(__x86_64__)
static void* tops[MOST];
static void* scheduler;

// Keeps the registers that a function must keep, and goes on where another stack stopped.
__attribute__((naked, noinline)) UNCHECKED static void change(void**, void*) {
    asm("pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15; movq %rsp, (%rdi); movq %rsi, %rsp;"
        "popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp; ret");
}

UNCHECKED static void leave() { change(&tops[current], scheduler); }
UNCHECKED static void resume() { change(&scheduler, tops[current]); }
static void enter();

UNCHECKED static void begin(size_t i) {
    void** top = (void**)(stacks + (i + 1) * STACK) - 2;
    *top = (void*)enter;
    top[1] = nullptr;  // where enter would return to: here ends what a sanitizer follows for its report
    for (int k = 1; k <= 6; ++k) top[-k] = nullptr;
    tops[i] = top - 6;
}
#else
#include <ucontext.h>
static ucontext_t tops[MOST], scheduler;
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

UNCHECKED void wait_at(State place) { state[current] = place; leave(); }

UNCHECKED static void enter() {
    body();
    wait_at(DONE);
}

// Let those go on who wait for others that are all there; false where nobody can.
UNCHECKED static bool release() {
    bool moved = false, is_block = true, is_over = true;
    for (size_t w = 0; w < count; w += 32) {
        size_t waiting = 0, done = 0, end = w + 32 < count ? w + 32 : count;
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
        for (size_t i = 0; i < count; ++i) if (state[i] == AT_BLOCK) state[i] = READY;
        moved = true;
    }
    return moved;
}

// False where threads wait for each other in different places.
UNCHECKED static bool run_block() {
    static unsigned order[MOST];
    for (size_t i = 0; i < count; ++i) state[i] = READY, order[i] = i, begin(i);
    do {
        shuffle(order, count);
        for (size_t k = 0; k < count; ++k) {
            const size_t i = order[k];
            if (state[i] != READY) continue;
            current = i;
            threadIdx = {unsigned(i % blockDim.x), unsigned(i / blockDim.x), 0};
            resume();
        }
    } while (release());
    for (size_t i = 0; i < count; ++i) if (state[i] != DONE) return false;
    return true;
}

// All blocks of a launch; 0, or -3 where a barrier is not met by all threads.
UNCHECKED int run_all(void (*of_a_thread)(), const unsigned* grid, const unsigned* block, size_t shared) {
    if (!stacks) stacks = (char*)malloc(MOST * STACK);
    body = of_a_thread;
    gridDim = {grid[0], grid[1], 1};
    blockDim = {block[0], block[1], 1};
    count = blockDim.x * blockDim.y;
    share(shared / 4);
    const size_t num_blocks = size_t(grid[0]) * grid[1];
    unsigned* order = (unsigned*)malloc(num_blocks * sizeof(unsigned));
    for (size_t i = 0; i < num_blocks; ++i) order[i] = i;
    shuffle(order, num_blocks);
    bool is_met = true;
    for (size_t k = 0; k < num_blocks && is_met; ++k) {
        blockIdx = {order[k] % grid[0], order[k] / grid[0], 0};
        is_met = run_block();
    }
    free(order);
    return is_met ? 0 : -3;
}
