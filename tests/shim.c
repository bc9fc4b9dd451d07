/* Stands between a program and the system, by LD_PRELOAD: slow storage, one without locks, a clock that is
   set to and fro, a log of what is done to files, and a death at the n-th of those calls. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) (__typeof__(&name)) dlsym(RTLD_NEXT, #name)

static long left = -1; /* calls until the end; -1: none comes */
static int log_to = -1;

void shim_die_after(long calls) { left = calls; }

void shim_log(const char *path) {
  log_to = path ? (REAL(open))(path, O_WRONLY | O_CREAT | O_TRUNC, 0644) : -1;
}

static void path_of(int file, char *path) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t n = readlink(link, path, 4095);
  path[n > 0 ? n : 0] = 0;
}

static void call(const char *name, const char *path) {
  if (log_to >= 0) dprintf(log_to, "%s %s\n", name, path);
  if (left >= 0 && left-- == 0) kill(getpid(), SIGKILL);
}

static void call_on(const char *name, int file) {
  char path[4096];
  if (log_to < 0 && left < 0) return;
  if (file <= 2 || file == log_to) return;
  path_of(file, path);
  if (path[0] == '/' && strncmp(path, "/dev/", 5) && strncmp(path, "/proc/", 6)) call(name, path);
}

ssize_t write(int file, const void *data, size_t size) {
  call_on("write", file);
  return (REAL(write))(file, data, size);
}

int ftruncate64(int file, off64_t size) {
  call_on("truncate", file);
  return (REAL(ftruncate64))(file, size);
}

int fsync(int file) {
  const char *slow = getenv("SHIM_SLOW_FSYNC");
  char path[4096];
  call_on("fsync", file);
  path_of(file, path);
  if (slow && strstr(path, ".h5")) usleep((useconds_t)(atof(slow) * 1e6));
  return (REAL(fsync))(file);
}

int flock(int file, int operation) {
  if (getenv("SHIM_NO_LOCKS")) {
    errno = ENOSYS;
    return -1;
  }
  return (REAL(flock))(file, operation);
}

int rename(const char *from, const char *to) {
  call("rename", to);
  return (REAL(rename))(from, to);
}

int mkdir(const char *path, mode_t mode) {
  call("mkdir", path);
  return (REAL(mkdir))(path, mode);
}

int unlinkat(int directory, const char *path, int flags) {
  char where[4096], whole[8192];
  path_of(directory, where);
  snprintf(whole, sizeof whole, "%s/%s", where, path);
  call("unlink", path[0] == '/' ? path : whole);
  return (REAL(unlinkat))(directory, path, flags);
}

/* Only for Python's own calls: a library that waits until a time of the clock asks the kernel, which knows better. */
static int from_python(void *caller) {
  Dl_info info;
  if (!dladdr(caller, &info) || !info.dli_fname) return 0;
  const char *name = strrchr(info.dli_fname, '/');
  name = name ? name + 1 : info.dli_fname;
  return !strncmp(name, "python", 6) || !strncmp(name, "libpython", 9);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int code = (REAL(clock_gettime))(clock, now);
  if (clock == CLOCK_REALTIME && getenv("SHIM_CLOCK") && from_python(__builtin_return_address(0)))
    now->tv_sec += now->tv_nsec / 1000 % 2 ? 3600 : -3600;
  return code;
}
