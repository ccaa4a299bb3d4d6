/* Who uses the library: beside the script, users/ has a file for each process
 * that is initialised, named by its number and locked by it. A process that is
 * killed leaves its file behind, but not the lock.
 */
#include "fake.h"

#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static char path[PATH_MAX];
static pid_t owner;
static int file = -1;

void enter_users(void)
{
    const char *script = getenv("FAKE_NVML_SCRIPT"), *slash = script ? strrchr(script, '/') : NULL;
    int length = slash ? (int)(slash - script) : 0;
    owner = getpid();
    snprintf(path, sizeof path, "%.*s/users", length, slash ? script : "");
    mkdir(path, 0777);
    snprintf(path, sizeof path, "%.*s/users/%d", length, slash ? script : "", (int)owner);
    file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (file < 0 || flock(file, LOCK_EX | LOCK_NB) != 0)
        perror(path);
}

/* A forked child has its parent's file open, but it is not its own. */
__attribute__((destructor)) void leave_users(void)
{
    if (file >= 0 && owner == getpid()) {
        unlink(path);
        close(file);
    }
    file = -1;
}
