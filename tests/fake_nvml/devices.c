/* The library itself, and how a caller comes by a handle. */
#include "fake.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

/* nvmlPciInfo_t under a name of our own. */
struct pci_info {
    char legacy_id[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char id[32];
};

struct handle { char unused; };
static struct handle handles[MAX_DEVICES];

int number_of(nvmlDevice_t handle)
{
    bool good = handle >= handles && handle < handles + MAX_DEVICES;
    return good ? (int)((uintptr_t)handle - (uintptr_t)handles) : -1;
}

nvmlDevice_t handle_of(int device)
{
    return &handles[device];
}

API int nvmlInit_v2(void)
{
    return open_library(true);
}

API int nvmlInitWithFlags(unsigned flags)
{
    return open_library(!(flags & INIT_FLAG_NO_ATTACH));
}

API int nvmlShutdown(void)
{
    return close_library();
}

API const char *nvmlErrorString(int ret)
{
    static const char *const texts[] = {
        "Success", "Uninitialized", "Invalid Argument", "Not Supported",
        "Insufficient Permissions", "Already Initialized", "Not Found", "Insufficient Size",
        "Insufficient External Power", "Driver Not Loaded", "Timeout",
        "Interrupt Request Issue", "NVML Shared Library Not Found", "Function Not Found",
        "Corrupted infoROM", "GPU is lost", "GPU requires reset",
        "GPU access blocked by the operating system", "Driver/library version mismatch",
        "In use by another client", "Insufficient Memory", "No data",
        "The requested vgpu operation is not available on target device, because ECC is enabled",
        "Insufficient Resources", "Frequency not supported", "Argument Version Mismatch",
        "Deprecated", "Not Ready", "GPU not found", "Invalid state", "Reset type not supported"
    };
    return ret >= 0 && ret < (int)(sizeof texts / sizeof *texts) ? texts[ret] : "Unknown Error";
}

static int get_process_text(const struct call *call, char *out, unsigned length)
{
    struct reply reply;
    int ret = answer(call, &reply);
    if (ret != SUCCESS || !out)
        return ret != SUCCESS ? ret : INVALID_ARGUMENT;
    if (reply.step && reply.step->text)
        return put_text(out, length, reply.step->text);
    bool library = call->function == FN_nvmlSystemGetNVMLVersion;
    char text[83] = "13.";
    driver_version(library, text + 3);
    return put_text(out, length, library ? text : text + 3);
}

#define PROCESS_TEXT(fn, text)                    \
    API int fn(char *out, unsigned length)        \
    {                                             \
        return get_process_text(CALL(FN_##fn, 0), out, length); \
    }
#include "functions.h"

static int get_process_uint(const struct call *call, uint64_t fallback, unsigned *out)
{
    struct reply reply;
    int ret = answer(call, &reply);
    if (ret != SUCCESS || !out)
        return ret != SUCCESS ? ret : INVALID_ARGUMENT;
    *out = (unsigned)(reply.step && reply.step->n_values ? value(call, &reply, 0) : fallback);
    return SUCCESS;
}

API int nvmlDeviceGetCount_v2(unsigned *out)
{
    struct roster gpus = {0};
    struct table *now = present(ANY, &gpus);
    int ret = get_process_uint(CALL(FN_nvmlDeviceGetCount, 0), (uint64_t)gpus.n, out);
    if (ret == SUCCESS && now && !gpus.n)
        *out = 0;
    return ret;
}

API int nvmlSystemGetCudaDriverVersion(int *out)
{
    uint64_t version = functions[FN_nvmlSystemGetCudaDriverVersion].values[0];
    return get_process_uint(CALL(FN_nvmlSystemGetCudaDriverVersion, 0), version, (unsigned *)out);
}

API int nvmlSystemGetCudaDriverVersion_v2(int *out)
{
    return nvmlSystemGetCudaDriverVersion(out);
}

static int open_handle(const struct call *call, nvmlDevice_t *out)
{
    struct reply reply;
    int ret = answer_device(call, &reply);
    if (ret == SUCCESS)
        *out = handle_of(call->device);
    return ret;
}

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *out)
{
    struct roster gpus;
    if (!present(ANY, &gpus))
        return UNINITIALIZED;
    if (!out || index >= (unsigned)gpus.n)
        return INVALID_ARGUMENT;
    return open_handle(CALL(FN_nvmlDeviceGetHandleByIndex, gpus.devices[index]), out);
}

API int nvmlDeviceGetHandleByPciBusId_v2(const char *address, nvmlDevice_t *out)
{
    unsigned domain, bus, slot, function;
    int length = -1;
    struct roster gpus;
    struct table *now = present(ANY, &gpus);
    if (!now)
        return UNINITIALIZED;
    if (!address || !out)
        return INVALID_ARGUMENT;
    if (sscanf(address, "%8x:%2x:%2x.%1x%n", &domain, &bus, &slot, &function, &length) != 4
        || address[length])
        return NOT_FOUND;
    for (int i = 0; i < gpus.n; i++) {
        const struct device *device = &now->devices[gpus.devices[i]];
        if (device->domain == domain && device->bus == bus && device->slot == slot
            && device->pci_function == function)
            return open_handle(CALL(FN_nvmlDeviceGetHandleByPciBusId, gpus.devices[i]), out);
    }
    return NOT_FOUND;
}

/* The driver asks each GPU in turn, so one that is stuck or lost spoils it. */
API int nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *out)
{
    struct roster gpus, migs;
    struct table *now = present(ANY, &gpus);
    if (!now)
        return UNINITIALIZED;
    if (!uuid || !out)
        return INVALID_ARGUMENT;
    for (int i = 0; i < gpus.n; i++) {
        int gpu = gpus.devices[i];
        int ret = open_handle(CALL(FN_nvmlDeviceGetHandleByUUID, gpu), out);
        if (ret != SUCCESS || strcasecmp(now->devices[gpu].uuid, uuid) == 0)
            return ret;
        present(gpu, &migs);
        for (int k = 0; k < migs.n; k++)
            if (strcasecmp(now->devices[migs.devices[k]].uuid, uuid) == 0)
                return open_handle(CALL(FN_nvmlDeviceGetHandleByUUID, migs.devices[k]), out);
    }
    return NOT_FOUND;
}

/* Put the scripted address, else the device's. */
static int put_pci(struct pci_info *out, const struct reply *reply, const struct device *device)
{
    unsigned domain = device->domain, bus = device->bus, slot = device->slot;
    unsigned function = device->pci_function, id = 0x2330;
    if (reply->step && reply->step->text)
        sscanf(reply->step->text, "%8x:%2x:%2x.%1x %4x", &domain, &bus, &slot, &function, &id);
    *out = (struct pci_info){.domain = domain, .bus = bus, .device = slot,
                             .device_id = id << 16 | 0x10de, .subsystem_id = 0x16c110de};
    snprintf(out->legacy_id, sizeof out->legacy_id, "%04X:%02X:%02X.%X",
             domain & 0xffff, bus & 0xff, slot & 0xff, function & 0xf);
    snprintf(out->id, sizeof out->id, "%08X:%02X:%02X.%X", domain, bus, slot, function);
    return SUCCESS;
}

API int nvmlDeviceGetPciInfo_v3(nvmlDevice_t handle, struct pci_info *out)
{
    const struct call *call = ON(FN_nvmlDeviceGetPciInfo_v3);
    struct reply reply;
    int ret = ask(call, out, &reply);
    return ret == SUCCESS ? put_pci(out, &reply, &reply.table->devices[call->device]) : ret;
}

/* By default the links go to the four NVSwitches of an HGX board. */
API int nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t handle, unsigned link,
                                            struct pci_info *out)
{
    const struct device nvswitch = {.bus = 5 + link % 4};
    struct reply reply;
    int ret = ask(ON(FN_nvmlDeviceGetNvLinkRemotePciInfo_v2, link), out, &reply);
    if (ret != SUCCESS)
        return ret;
    put_pci(out, &reply, &nvswitch);
    out->device_id = 0x22a310de;
    return SUCCESS;
}
