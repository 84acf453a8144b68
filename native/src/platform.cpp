#include "platform.h"

#include <cerrno>
#include <cstdlib>
#include <stdexcept>
#include <system_error>

#if defined(_WIN32)
#include <malloc.h>
#else
#include <fcntl.h>
#include <unistd.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#if defined(__aarch64__)
#include <sys/auxv.h>
#endif
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace transduce {

#if defined(_WIN32)
void* allocate_aligned(size_t bytes) { return _aligned_malloc(bytes, 64); }
void free_aligned(void* memory) { _aligned_free(memory); }
int process_id() { return 1; }  // there is no fork

Bell::Bell() { throw std::runtime_error("an event loop cannot wait for the native library on Windows"); }
Bell::~Bell() = default;
void Bell::ring() const {}
void Bell::silence() const {}
#else
void* allocate_aligned(size_t bytes) { return std::aligned_alloc(64, bytes); }
void free_aligned(void* memory) { std::free(memory); }
int process_id() { return getpid(); }

Bell::Bell() {
    if (pipe(ends_)) throw std::system_error(errno, std::generic_category(), "pipe");
    for (const int end : ends_) fcntl(end, F_SETFD, FD_CLOEXEC), fcntl(end, F_SETFL, O_NONBLOCK);
}

Bell::~Bell() {
    for (const int end : ends_) close(end);
}

void Bell::ring() const {
    const ssize_t n = write(ends_[1], "!", 1);
    (void)n;  // full: it rings already
}

void Bell::silence() const {
    char bytes[64];
    while (read(ends_[0], bytes, sizeof bytes) == sizeof bytes) continue;
}
#endif

bool request_amx_tiles() {
#if defined(__linux__) && defined(__x86_64__)
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}

#if defined(__aarch64__) && defined(__linux__)
bool has_arm_dot_product() { return getauxval(AT_HWCAP) & HWCAP_ASIMDDP; }
bool has_arm_i8mm() { return getauxval(AT_HWCAP2) & 1 << 13; }  // HWCAP2_I8MM, unknown to old headers
#elif defined(__aarch64__) && defined(__APPLE__)
static bool has_feature(const char* name) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value;
}
bool has_arm_dot_product() { return has_feature("hw.optional.arm.FEAT_DotProd"); }
bool has_arm_i8mm() { return has_feature("hw.optional.arm.FEAT_I8MM"); }
#else
bool has_arm_dot_product() { return false; }
bool has_arm_i8mm() { return false; }
#endif

}  // namespace transduce
