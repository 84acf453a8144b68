// Lets a library that was compiled on a current system run on older ones: Linux with glibc 2.28 and the C++ runtime of GCC 8. All
// definitions are hidden: they serve this library alone.
#include <new>

#define HIDDEN __attribute__((visibility("hidden")))

#if defined(__GLIBCXX__) && __GNUC__ >= 11
namespace std {
// Called by the headers of GCC 11 and later.
HIDDEN void __throw_bad_array_new_length() { throw std::bad_array_new_length(); }
}  // namespace std
#endif

#if defined(__GLIBC__)
#include <pthread.h>

#if defined(__x86_64__)
#define SINCE_2_3 "GLIBC_2.3.3"
#define SINCE_2_0 "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define SINCE_2_3 "GLIBC_2.17"
#define SINCE_2_0 "GLIBC_2.17"
#endif

extern "C" {
// std::shared_ptr counts without atomic operations while this is true (glibc 2.32).
HIDDEN extern char __libc_single_threaded;
char __libc_single_threaded = false;

#if defined(SINCE_2_0)
// glibc 2.29 and 2.34 gave these functions new symbol versions. Link to the old versions, which older systems have too.
__asm__(".symver old_exp, exp@" SINCE_2_0);
__asm__(".symver old_log, log@" SINCE_2_0);
__asm__(".symver old_pow, pow@" SINCE_2_0);
__asm__(".symver old_setclock, pthread_condattr_setclock@" SINCE_2_3);
double old_exp(double);
double old_log(double);
double old_pow(double, double);
int old_setclock(pthread_condattr_t*, clockid_t);
double exp(double x) { return old_exp(x); }
double log(double x) { return old_log(x); }
double pow(double x, double y) { return old_pow(x, y); }
__asm__(".hidden exp, log, pow");  // the compiler ignores the attribute on functions that it knows
HIDDEN int pthread_condattr_setclock(pthread_condattr_t* attributes, clockid_t clock) { return old_setclock(attributes, clock); }
#endif
}
#endif
