// Settings and ears for g++'s address and undefined-behaviour sanitizers, which are loaded late, into a running Python:
// a library of these names, loaded first and for all, answers their questions. With -DPOISON, a second library: memory
// that kernels must not touch, which the first one cannot name because the sanitizer is not there yet.
#include <cstddef>
#include <cstring>

extern "C" {
#ifdef POISON
#include <sanitizer/asan_interface.h>
void poison(void* at, size_t size) { __asan_poison_memory_region(at, size); }
void unpoison(void* at, size_t size) { __asan_unpoison_memory_region(at, size); }
void listen(void (*heard)(const char*)) { __asan_set_error_report_callback(heard); }
#else
static int num_reports;
static char first[2048];

const char* __asan_default_options() {
    return "verify_asan_link_order=0:halt_on_error=0:detect_leaks=0:handle_segv=0:handle_abort=0:handle_sigbus=0:"
           "handle_sigfpe=0:handle_sigill=0:use_sigaltstack=0:suppress_equal_pcs=0:print_legend=0:detect_odr_violation=0";
}
const char* __ubsan_default_options() { return "halt_on_error=0"; }
void heard(const char* text) {
    if (!num_reports++) strncpy(first, text, sizeof first - 1);
}
void __ubsan_on_report() { heard("undefined behaviour (g++'s sanitizer has printed where)"); }
int reports() { return num_reports; }
const char* report() { return first; }
void forget() { num_reports = 0; }
#endif
}
