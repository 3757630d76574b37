/* Loaded before the C library, it fails calls on files below a folder; see faults.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>
enum { WRITE = 1, SYNC = 2, NAME = 4, RENAME = 8, REMOVE = 16 };
static char home[4096];
static long seen, first, counts[5];
static int number, kinds, sticky, armed;
void fault_arm(const char *folder, int which, long place, int code, int all_later) {
    strncpy(home, folder, sizeof home - 1);
    kinds = which; first = place; number = code; sticky = all_later; seen = 0; armed = 1;
}
long fault_disarm(void) { armed = 0; return seen; }
long fault_count(int bit) { return counts[bit]; }
static int fails(const char *path, int kind) {
    if (!armed || strncmp(path, home, strlen(home))) return 0;
    for (int bit = 0; bit < 5; bit++) if (kind >> bit & 1) __sync_fetch_and_add(&counts[bit], 1);
    if (!(kinds & kind)) return 0;
    long place = __sync_fetch_and_add(&seen, 1);
    if (first < 0 || place < first || (place > first && !sticky)) return 0;
    if (number < 0) kill(getpid(), -number);
    errno = number;
    return 1;
}
static int fails_fd(int fd, int kind) {
    if (!armed) return 0;
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return fails(path, kind);
}
static int fails_at(int folder, const char *path, int kind) {
    if (!armed) return 0;
    if (path[0] == '/') return fails(path, kind);
    char full[8192], link[64];
    if (folder == AT_FDCWD) { if (!getcwd(full, 4096)) return 0; }
    else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t length = readlink(link, full, 4095);
        if (length < 0) return 0;
        full[length] = 0;
    }
    strcat(full, "/");
    strncat(full, path, 4000);
    return fails(full, kind);
}
#define REAL(type, name, ...) static type (*real)(__VA_ARGS__); if (!real) real = dlsym(RTLD_NEXT, #name)
#define BY_FD(type, name, kind, args, ...) type name args { \
    REAL(type, name, __VA_ARGS__); if (fails_fd(fd, kind)) return -1; return real
BY_FD(ssize_t, write, WRITE, (int fd, const void *a, size_t n), int, const void *, size_t)(fd, a, n); }
BY_FD(ssize_t, pwrite, WRITE, (int fd, const void *a, size_t n, off_t o), int, const void *, size_t, off_t)
    (fd, a, n, o); }
BY_FD(ssize_t, pwrite64, WRITE, (int fd, const void *a, size_t n, off_t o), int, const void *, size_t, off_t)
    (fd, a, n, o); }
BY_FD(ssize_t, writev, WRITE, (int fd, const struct iovec *a, int n), int, const struct iovec *, int)(fd, a, n); }
BY_FD(int, ftruncate, WRITE, (int fd, off_t n), int, off_t)(fd, n); }
BY_FD(int, ftruncate64, WRITE, (int fd, off_t n), int, off_t)(fd, n); }
BY_FD(int, fsync, SYNC, (int fd), int)(fd); }
BY_FD(int, fdatasync, SYNC, (int fd), int)(fd); }
size_t fwrite(const void *a, size_t size, size_t n, FILE *file) {
    REAL(size_t, fwrite, const void *, size_t, size_t, FILE *);
    return fails_fd(fileno(file), WRITE) ? 0 : real(a, size, n, file);
}
#define BY_NAME(name, kind, args, path, at, ...) int name args { \
    REAL(int, name, __VA_ARGS__); if (fails_at(at, path, kind)) return -1; return real
BY_NAME(rename, NAME | RENAME, (const char *a, const char *b), b, AT_FDCWD, const char *, const char *)(a, b); }
BY_NAME(renameat, NAME | RENAME, (int d, const char *a, int e, const char *b), b, e, int, const char *, int,
        const char *)(d, a, e, b); }
BY_NAME(renameat2, NAME | RENAME, (int d, const char *a, int e, const char *b, unsigned f), b, e, int, const char *,
        int, const char *, unsigned)(d, a, e, b, f); }
BY_NAME(link, NAME, (const char *a, const char *b), b, AT_FDCWD, const char *, const char *)(a, b); }
BY_NAME(linkat, NAME, (int d, const char *a, int e, const char *b, int f), b, e, int, const char *, int, const char *,
        int)(d, a, e, b, f); }
BY_NAME(mkdir, NAME, (const char *a, mode_t m), a, AT_FDCWD, const char *, mode_t)(a, m); }
BY_NAME(mkdirat, NAME, (int d, const char *a, mode_t m), a, d, int, const char *, mode_t)(d, a, m); }
BY_NAME(unlink, REMOVE, (const char *a), a, AT_FDCWD, const char *)(a); }
BY_NAME(unlinkat, REMOVE, (int d, const char *a, int f), a, d, int, const char *, int)(d, a, f); }
BY_NAME(rmdir, REMOVE, (const char *a), a, AT_FDCWD, const char *)(a); }
#define OPEN(name, args, at, path, call, ...) int name args { \
    REAL(int, name, __VA_ARGS__); mode_t mode = 0; \
    va_list rest; va_start(rest, flags); if (flags & (O_CREAT | O_TMPFILE)) mode = va_arg(rest, mode_t); va_end(rest); \
    if ((flags & (O_CREAT | O_WRONLY | O_RDWR)) && fails_at(at, path, NAME)) return -1; return real call; }
OPEN(open, (const char *path, int flags, ...), AT_FDCWD, path, (path, flags, mode), const char *, int, ...)
OPEN(open64, (const char *path, int flags, ...), AT_FDCWD, path, (path, flags, mode), const char *, int, ...)
OPEN(openat, (int d, const char *path, int flags, ...), d, path, (d, path, flags, mode), int, const char *, int, ...)
OPEN(openat64, (int d, const char *path, int flags, ...), d, path, (d, path, flags, mode), int, const char *, int, ...)
