/* Makes every request for a lock of a file fail with the errno NOLOCK_ERRNO, as a file system without locks does.
 *   cc -shared -fPIC -o nolock.so nolock.c -ldl && LD_PRELOAD=$PWD/nolock.so NOLOCK_ERRNO=37 program
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/file.h>

static int refused(void)
{
    errno = atoi(getenv("NOLOCK_ERRNO"));
    return -1;
}

static int control(const char *name, int fd, int command, void *argument)
{
    int (*next)(int, int, ...) = (int (*)(int, int, ...))dlsym(RTLD_NEXT, name);
    switch (command) {
    case F_SETLK: case F_SETLKW: case F_GETLK:
    case F_OFD_SETLK: case F_OFD_SETLKW: case F_OFD_GETLK:
        return refused();
    }
    return next(fd, command, argument);
}

int fcntl(int fd, int command, ...)
{
    va_list rest;
    va_start(rest, command);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    return control("fcntl", fd, command, argument);
}

int fcntl64(int fd, int command, ...)
{
    va_list rest;
    va_start(rest, command);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    return control("fcntl64", fd, command, argument);
}

int flock(int fd, int operation)
{
    (void)fd;
    (void)operation;
    return refused();
}
