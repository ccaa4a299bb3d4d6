/* The state of the fake NVML in one process: the script in force, whether it is
 * initialised, and the answering of one call with its delay or its crash. No
 * call holds the lock while it is delayed, so one hung GPU leaves the rest
 * usable.
 */
#include "fake.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const int64_t SECOND = 1000000000, DAY = 86400000000000;
static const int64_t RELOAD_CHECK = 20000000, SPIN = 100000;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* Tables replaced are kept (->older): a call asleep may still point into one. */
static struct table *table;
static struct stat seen;       /* the script file last read */
static bool bad_script = true; /* that reading failed */
static int64_t next_check_ns;
static int n_inits;
static bool attach_gpus;       /* as the first init asked for */
static _Atomic bool opened[MAX_DEVICES];

int64_t clock_ns(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * SECOND + now.tv_nsec;
}

/* Signals only interrupt this sleep, as they do a call stuck in the driver. */
static void take(int64_t from_ns, int64_t takes_ns)
{
    if (takes_ns >= 0 && takes_ns < SPIN) { /* a sleep would take longer */
        while (clock_ns(CLOCK_MONOTONIC) < from_ns + takes_ns)
            ;
        return;
    }
    bool for_ever = takes_ns < 0 || takes_ns > INT64_MAX / 2;
    int64_t end = from_ns + (for_ever ? DAY : takes_ns);
    struct timespec until = {end / SECOND, end % SECOND};
    do
        while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR)
            ;
    while (for_ever && (until.tv_sec += DAY / SECOND));
}

/* A handler (faulthandler, say) sees the signal first, then the process dies. */
_Noreturn static void die(int number)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, number);
    raise(number);
    signal(number, SIG_DFL);
    pthread_sigmask(SIG_UNBLOCK, &set, NULL);
    raise(number);
    _exit(128 + number);
}

/* Read the script again if its file is another one than that last read. */
static void refresh(int64_t now_ns, bool at_once)
{
    const char *path = getenv("FAKE_NVML_SCRIPT");
    struct stat found;
    if (now_ns < next_check_ns && !at_once)
        return;
    next_check_ns = now_ns + RELOAD_CHECK;
    if (!path || stat(path, &found) != 0) {
        if (at_once)
            fprintf(stderr, "fake nvml: no script at FAKE_NVML_SCRIPT=%s\n", path ? path : "");
        bad_script |= at_once;
        return;
    }
    bool same = found.st_ino == seen.st_ino && found.st_dev == seen.st_dev
                && found.st_size == seen.st_size && found.st_mtim.tv_sec == seen.st_mtim.tv_sec
                && found.st_mtim.tv_nsec == seen.st_mtim.tv_nsec;
    if (same && !(bad_script && at_once))
        return;
    seen = found;
    struct table *loaded = table_load(path, table);
    bad_script = !loaded;
    if (loaded)
        table = loaded;
}

/* The script as it is now; NULL: not initialised. */
struct table *ready(void)
{
    pthread_mutex_lock(&lock);
    if (n_inits > 0)
        refresh(clock_ns(CLOCK_MONOTONIC), false);
    struct table *now = n_inits > 0 ? table : NULL;
    pthread_mutex_unlock(&lock);
    return now;
}

/* Find the step that answers, and tell an error if the device is not there. */
static int find(const struct call *call, int64_t now_ns, struct reply *reply)
{
    reply->step = table_pick(table, call, now_ns);
    if (functions[call->function].scope == SCOPE_PROCESS)
        return SUCCESS;
    struct roster gpus, migs;
    struct call on_gpu = *call;
    bool is_mig = call->device >= MAX_GPUS;
    if (is_mig)
        on_gpu.device = table->devices[call->device].parent;
    table_roster(table, ANY, now_ns, &gpus);
    table_roster(table, on_gpu.device, now_ns, &migs);
    reply->mig = migs.scripted;
    reply->index = roster_index(is_mig ? &migs : &gpus, call->device);
    if (is_mig && !reply->step) { /* what ails the GPU ails its MIG devices */
        const struct step *step = table_pick(table, &on_gpu, now_ns);
        reply->step = step && step->ret != SUCCESS ? step : NULL;
    }
    if (roster_index(&gpus, on_gpu.device) == ANY)
        return GPU_IS_LOST;
    return reply->index == ANY ? INVALID_ARGUMENT : SUCCESS;
}

int answer(const struct call *call, struct reply *reply)
{
    bool init = call->function == FN_nvmlInit;
    int64_t now_ns = clock_ns(CLOCK_MONOTONIC);
    int ret = SUCCESS;
    *reply = (struct reply){0};
    pthread_mutex_lock(&lock);
    if (!init && n_inits == 0) {
        ret = UNINITIALIZED;
    } else {
        refresh(now_ns, init);
        reply->table = table;
        if (init && bad_script)
            ret = UNKNOWN;
        else if (functions[call->function].scope != SCOPE_PROCESS
                 && !table_has(table, call->device))
            ret = INVALID_ARGUMENT;
        else
            ret = find(call, now_ns - table->epoch_ns, reply);
    }
    pthread_mutex_unlock(&lock);
    if (reply->step && reply->step->takes_ns)
        take(now_ns, reply->step->takes_ns);
    if (reply->step && reply->step->ret == CRASH)
        die(reply->step->signal);
    if (reply->step && reply->step->ret != SUCCESS)
        ret = reply->step->ret;
    if (reply->table)
        reply->now_ns = clock_ns(CLOCK_MONOTONIC) - reply->table->epoch_ns;
    return ret;
}

int answer_device(const struct call *call, struct reply *reply)
{
    if (call->device < 0)
        return ready() ? INVALID_ARGUMENT : UNINITIALIZED;
    if (!opened[call->device]) { /* a GPU without persistence mode wakes up first */
        int ret = answer(CALL(FN_firstCallAfterOpen, call->device), reply);
        if (ret == UNINITIALIZED || ret == INVALID_ARGUMENT)
            return ret;
        opened[call->device] = true;
        if (ret != SUCCESS)
            return ret;
    }
    return answer(call, reply);
}

void answer_past(const struct call *call, int64_t then_ns, struct reply *reply)
{
    pthread_mutex_lock(&lock);
    reply->step = table_past(reply->table, call, then_ns);
    pthread_mutex_unlock(&lock);
    reply->now_ns = then_ns;
}

struct table *present(int parent, struct roster *out)
{
    struct table *now = ready();
    if (!now)
        return NULL;
    pthread_mutex_lock(&lock);
    table_roster(now, parent, clock_ns(CLOCK_MONOTONIC) - now->epoch_ns, out);
    if (!attach_gpus)
        out->n = 0;
    pthread_mutex_unlock(&lock);
    return now;
}

/* What a process has opened stays, so its library is of the version it began with. */
void driver_version(bool library, char out[80])
{
    static char first[80];
    const struct call call = {.function = FN_driver};
    pthread_mutex_lock(&lock);
    const struct step *step = table_pick(table, &call, clock_ns(CLOCK_MONOTONIC) - table->epoch_ns);
    const char *text = step ? step->text : NULL;
    snprintf(out, 80, "%s", text ? text : functions[FN_nvmlSystemGetDriverVersion].text);
    if (!*first)
        strcpy(first, out);
    if (library)
        strcpy(out, first);
    pthread_mutex_unlock(&lock);
}

/* nvmlInit and nvmlShutdown are counted, as the real ones are. */
int open_library(bool attach)
{
    struct reply reply;
    char module[80], library[80];
    int ret = answer(CALL(FN_nvmlInit, 0), &reply);
    if (ret == SUCCESS) {
        driver_version(true, library);
        driver_version(false, module);
        ret = strcmp(module, library) == 0 ? SUCCESS : LIB_RM_VERSION_MISMATCH;
    }
    if (ret != SUCCESS)
        return ret;
    pthread_mutex_lock(&lock);
    if (n_inits++ == 0) {
        attach_gpus = attach;
        for (int i = 0; i < MAX_DEVICES; i++)
            opened[i] = false;
        enter_users();
    }
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

int close_library(void)
{
    struct reply reply;
    int ret = answer(CALL(FN_nvmlShutdown, 0), &reply);
    if (ret != SUCCESS)
        return ret;
    pthread_mutex_lock(&lock);
    if (n_inits > 0 && --n_inits == 0)
        leave_users();
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}
